// The golden files: the same bytes for every definition of the format.
#include "golden.h"

using namespace gradwire;
using namespace support;

CASE(every_table_writes_the_golden_messages_again) {
    for_every_table([] {
        const unsigned files = for_every_golden("valid", [](const Bytes& bytes) {
            const MessageView message = parse(bytes);
            const Header& header = message.header;
            if (header.kind == Kind::kTernary) {
                const Entries entries = list(message);
                CHECK(encode(entries, header) == bytes);
                CHECK(encode_plainly(entries, header) == bytes);
                return;
            }
            const bool wide = header.dtype == DenseType::kFloat64;
            std::vector<double> values(header.numel);  // large enough for either type
            decode_dense(message, values.data());
            const Dtype dtype = wide ? Dtype::kFloat64 : Dtype::kFloat32;
            const MessageBytes again =
                encode_dense({{values.data(), header.numel, dtype}}, header.dtype, header.key, header.step);
            CHECK(exactly(again.bytes.get(), again.size) == bytes);
        });
        CHECK(files >= 30);
    });
}

CASE(every_table_refuses_the_invalid_golden_messages) {
    for_every_table([] {
        const unsigned files =
            for_every_golden("invalid", [](const Bytes& bytes) { CHECK_THROWS(MessageError, parse(bytes)); });
        CHECK(files >= 45);
    });
}
