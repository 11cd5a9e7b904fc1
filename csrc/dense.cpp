#include "dense.h"

#include "common/scalars.h"

namespace gradwire {
namespace {

template <class Value, class Convert>
void put_values(const ConstArray& values, uint8_t* out, Convert convert) {
    const auto* from = static_cast<const Value*>(values.data);
    for (uint64_t i = 0; i < values.numel; ++i) {
        const auto value = convert(from[i]);
        std::memcpy(out + i * sizeof value, &value, sizeof value);
    }
}

template <class Value>
void put_values(const ConstArray& values, DenseType dtype, uint8_t* out) {
    switch (dtype) {
        case DenseType::kFloat32: return put_values<Value>(values, out, [](Value v) { return static_cast<float>(v); });
        case DenseType::kFloat64: return put_values<Value>(values, out, [](Value v) { return static_cast<double>(v); });
        case DenseType::kBfloat16: return put_values<Value>(values, out, [](Value v) { return to_finite_bfloat16(v); });
        case DenseType::kNone: break;
    }
}

}  // namespace

MessageBytes allocate_dense(uint64_t numel, DenseType dtype, uint32_t key, uint32_t step) {
    Header header;
    header.kind = Kind::kDense;
    header.dtype = dtype;
    header.key = key;
    header.step = step;
    header.numel = header.count = numel;
    header.payload_bytes = numel * bytes_per_value(dtype);
    return allocate_message(header);
}

void put_dense(const ConstArray& values, DenseType dtype, uint8_t* out) {
    with_value_of(values.dtype, [&](auto zero) { put_values<decltype(zero)>(values, dtype, out); });
}

MessageBytes encode_dense(const std::vector<ConstArray>& values, DenseType dtype, uint32_t key, uint32_t step) {
    MessageBytes message = allocate_dense(total_numel(values), dtype, key, step);
    uint8_t* payload = message.bytes.get() + kHeaderBytes;
    for (const ConstArray& array : values) {
        put_dense(array, dtype, payload);
        payload += array.numel * bytes_per_value(dtype);
    }
    seal_message(message);
    return message;
}

void decode_dense(const MessageView& message, void* out) {
    if (message.header.numel == 0) return;  // and `out` may be null
    if (message.header.dtype != DenseType::kBfloat16) {
        std::memcpy(out, message.payload, message.header.payload_bytes);
        return;
    }
    auto* values = static_cast<float*>(out);
    for (uint64_t i = 0; i < message.header.numel; ++i) {
        uint16_t bits;
        std::memcpy(&bits, message.payload + 2 * i, sizeof bits);
        values[i] = bfloat16_to_float(bits);
    }
}

}  // namespace gradwire
