#include "support.h"

#include <limits>

namespace support {
namespace {

using gradwire::Dtype;

// Appends single bits.
class Bits {
  public:
    void put(bool bit) {
        if (count_ % 8 == 0) bytes_.push_back(0);
        bytes_.back() = static_cast<uint8_t>(bytes_.back() | unsigned(bit) << (count_ % 8));
        ++count_;
    }
    void put(uint64_t value, unsigned bits) {
        for (unsigned i = 0; i < bits; ++i) put(value >> i & 1);
    }
    const Bytes& bytes() const { return bytes_; }

  private:
    Bytes bytes_;
    uint64_t count_ = 0;
};

void put_varint(Bytes& bytes, uint64_t value) {
    for (; value >= 128; value /= 128) bytes.push_back(static_cast<uint8_t>(value % 128 + 128));
    bytes.push_back(static_cast<uint8_t>(value));
}

template <class T>
void put_field(Bytes& bytes, T value) {
    for (unsigned i = 0; i < sizeof value; ++i) bytes.push_back(static_cast<uint8_t>(uint64_t{value} >> (8 * i)));
}

unsigned length_of(uint64_t value) {
    unsigned bits = 0;
    for (; value > 0; value /= 2) ++bits;
    return bits;
}

template <class T>
double get_as(const void* data, uint64_t index) {
    T value;
    std::memcpy(&value, static_cast<const uint8_t*>(data) + index * sizeof value, sizeof value);
    return static_cast<double>(value);
}

uint16_t get_bits(const void* data, uint64_t index) {
    uint16_t bits;
    std::memcpy(&bits, static_cast<const uint8_t*>(data) + index * 2, 2);
    return bits;
}

template <class T>
void put_as(void* data, uint64_t index, T value) {
    std::memcpy(static_cast<uint8_t*>(data) + index * sizeof value, &value, sizeof value);
}

// A narrow float with `fraction` bits of fraction and exponents biased by `bias`; its largest exponent is special.
double widen(uint16_t bits, unsigned fraction, int bias) {
    const int special = 2 * bias + 1;
    const int exponent = bits >> fraction & special;
    const int mantissa = bits & ((1 << fraction) - 1);
    const int one = 1 << fraction;
    double value =
        std::ldexp(exponent > 0 ? mantissa + one : mantissa, (exponent > 0 ? exponent : 1) - bias - int(fraction));
    if (exponent == special)
        value = mantissa > 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    return bits >> 15 ? -value : value;
}

uint16_t narrow(double value, unsigned fraction, int bias) {
    const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const int special = 2 * bias + 1;
    if (std::isnan(value)) return static_cast<uint16_t>(sign | special << fraction | 1 << (fraction - 1));
    if (std::isinf(value)) return static_cast<uint16_t>(sign | special << fraction);
    const double magnitude = std::fabs(value);
    if (magnitude == 0) return sign;
    const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
    if (exponent > bias) return static_cast<uint16_t>(sign | ((special << fraction) - 1));
    const auto scaled = static_cast<int>(std::ldexp(magnitude, int(fraction) - exponent));
    const int implicit = 1 << fraction;
    return static_cast<uint16_t>(sign |
                                 (scaled < implicit ? scaled : scaled - implicit + ((exponent + bias) << fraction)));
}

}  // namespace

gradwire::Header header_for(uint64_t numel, uint16_t threshold, uint32_t key, uint32_t step) {
    gradwire::Header header;
    header.numel = numel;
    header.threshold = threshold;
    header.key = key;
    header.step = step;
    return header;
}

Bytes encode(const Entries& entries, gradwire::Header header, unsigned threads) {
    header.numel = entries.numel;
    std::vector<gradwire::MaskWord> words;
    for (size_t i = 0; i < entries.positions.size(); ++i) {
        const uint64_t index = entries.positions[i] / 64;
        if (words.empty() || words.back().index != index) words.push_back({index, 0, 0});
        const uint64_t bit = uint64_t{1} << (entries.positions[i] % 64);
        words.back().changed |= bit;
        if (entries.minus[i]) words.back().negative |= bit;
    }
    words.shrink_to_fit();
    const gradwire::MessageBytes message =
        gradwire::TernaryEncoder().encode(words.data(), words.size(), entries.positions.size(), header, threads);
    return exactly(message.bytes.get(), message.size);
}

Bytes encode_plainly(const Entries& entries, gradwire::Header header, unsigned zeros) {
    const uint64_t count = entries.positions.size();
    const unsigned exponent = std::max(8U, length_of(std::max<uint64_t>(count, 1) - 1) / 2 + 2);
    const uint64_t per_chunk = uint64_t{1} << exponent;
    Bytes directory;
    Bits bits;
    uint64_t begin = 0;
    for (uint64_t first = 0; first < count; first += per_chunk) {
        const uint64_t changed = std::min(per_chunk, count - first);
        const bool last = first + changed == count;
        const uint64_t end = last ? entries.numel : entries.positions[first + changed - 1] + 1;
        const uint64_t span = end - begin;
        const uint64_t unchanged = span - changed;
        const bool inverted = 20 * unchanged <= 7 * span;
        const uint64_t listed = inverted ? unchanged : changed;
        const unsigned rice = listed == 0 ? 0 : length_of(32 * (2 * span - listed) / (133 * listed));
        std::vector<uint64_t> distances;
        uint64_t next = begin;
        const auto list_element = [&](uint64_t position) {
            distances.push_back(position - next);
            next = position + 1;
        };
        if (inverted) {
            uint64_t entry = first;
            for (uint64_t at = begin; at < end; ++at)
                if (entry < first + changed && entries.positions[entry] == at)
                    ++entry;
                else
                    list_element(at);
        } else {
            for (uint64_t i = first; i < first + changed; ++i) list_element(entries.positions[i]);
        }
        uint64_t quotients = 0;
        for (const uint64_t distance : distances) quotients += distance >> rice;
        if (!last) {
            put_varint(directory, unchanged);
            if (rice > 0) put_varint(directory, quotients + zeros);
        }
        for (const uint64_t distance : distances) bits.put(distance, rice);
        for (uint64_t i = first; i < first + changed; ++i) bits.put(entries.minus[i] != 0);
        for (const uint64_t distance : distances) {
            for (uint64_t zero = 0; zero < distance >> rice; ++zero) bits.put(false);
            bits.put(true);
        }
        if (!last && rice > 0) bits.put(0, zeros);
        begin = end;
    }
    Bytes payload = directory;
    payload.insert(payload.end(), bits.bytes().begin(), bits.bytes().end());
    Bytes bytes{'G', 'R', 'D', 'W', 1, 1, header.flags, static_cast<uint8_t>(exponent)};
    put_field(bytes, header.threshold);
    put_field(bytes, uint16_t{0});
    put_field(bytes, header.key);
    put_field(bytes, header.step);
    put_field(bytes, uint32_t{0});
    put_field(bytes, entries.numel);
    put_field(bytes, count);
    put_field(bytes, uint64_t{payload.size()});
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    mend_checksum(bytes);
    return bytes;
}

gradwire::MessageView parse(const Bytes& bytes) {
    const gradwire::MessageView message = gradwire::read_message(bytes.data(), bytes.size());
    if (message.nbytes() != bytes.size()) throw gradwire::MessageError("bytes follow the message");
    gradwire::validate(message);
    return message;
}

Entries list(const gradwire::MessageView& message) {
    Entries entries;
    entries.numel = message.header.numel;
    std::vector<int64_t> positions(message.header.count);
    const std::unique_ptr<bool[]> minus(new bool[message.header.count]());
    gradwire::list_entries(message, positions.data(), minus.get());
    for (size_t i = 0; i < positions.size(); ++i) entries.add(static_cast<uint64_t>(positions[i]), minus[i]);
    return entries;
}

uint32_t crc32c_plainly(const Bytes& bytes) {
    uint32_t crc = ~uint32_t{0};
    for (const uint8_t byte : bytes) {
        crc ^= byte;
        for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ 0x82f63b78U : crc >> 1;
    }
    return ~crc;
}

void mend_checksum(Bytes& bytes) {
    for (unsigned i = 20; i < 24; ++i) bytes[i] = 0;
    const uint32_t crc = crc32c_plainly(bytes);
    for (unsigned i = 0; i < 4; ++i) bytes[20 + i] = static_cast<uint8_t>(crc >> (8 * i));
}

Bytes exactly(const uint8_t* bytes, uint64_t size) { return Bytes(bytes, bytes + size); }

double value_at(const void* data, uint64_t index, Dtype dtype) {
    switch (dtype) {
        case Dtype::kFloat32: return get_as<float>(data, index);
        case Dtype::kFloat64: return get_as<double>(data, index);
        case Dtype::kFloat16: return widen(get_bits(data, index), 10, 15);
        case Dtype::kBfloat16: return widen(get_bits(data, index), 7, 127);
        case Dtype::kNone: break;
    }
    return 0;
}

void put_value(void* data, uint64_t index, Dtype dtype, double value) {
    constexpr double kMost = std::numeric_limits<float>::max();
    switch (dtype) {
        case Dtype::kFloat32:
            if (std::isfinite(value)) value = std::max(-kMost, std::min(kMost, value));
            return put_as(data, index, static_cast<float>(value));
        case Dtype::kFloat64: return put_as(data, index, value);
        case Dtype::kFloat16: return put_as(data, index, narrow(value, 10, 15));
        case Dtype::kBfloat16: return put_as(data, index, narrow(value, 7, 127));
        case Dtype::kNone: return;
    }
}

double tricky_value(Random& random, double threshold, bool nonfinite) {
    const double sign = random.chance(0.5) ? -1 : 1;
    if (nonfinite && random.chance(0.02)) {
        switch (random.below(3)) {
            case 0: return sign * std::numeric_limits<double>::infinity();
            case 1: return sign * std::numeric_limits<double>::quiet_NaN();
            default: return sign * std::numeric_limits<float>::max();
        }
    }
    switch (random.below(14)) {
        case 0: return sign * threshold;
        case 1: return sign * std::nextafter(static_cast<float>(threshold), 0.0F);
        case 2: return sign * std::nextafter(static_cast<float>(threshold), 1e30F);
        case 3: return sign * 0.0;
        case 4: return sign * std::numeric_limits<float>::denorm_min() * static_cast<double>(random.below(1000));
        case 5: return sign * 5.960464477539063e-08 * static_cast<double>(random.below(1024));  // denormal as a half
        case 6: return sign * threshold * static_cast<double>(random.below(6));
        case 7: return sign * threshold * std::ldexp(1.0, static_cast<int>(random.below(30)));
        case 8: return sign * threshold / 2;
        default: return sign * threshold * 1.3 * random.uniform();
    }
}

}  // namespace support
