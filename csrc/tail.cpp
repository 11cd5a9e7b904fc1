#include "tail.h"

#include <algorithm>
#include <cmath>

#include "cpu/scalars.h"

namespace gradwire {
namespace {

constexpr uint64_t kSampled = uint64_t{1} << 18;
constexpr uint64_t kGroup = 16;
constexpr unsigned kBinShift = 17;  // 64 bins to the octave: the upper 15 bits of a float32
constexpr unsigned kBins = 0x7f800000U >> kBinShift;

float bin_edge(unsigned bin) { return bit_cast<float>(std::min(bin << kBinShift, 0x7f7fffffU)); }

// Counts magnitudes; zero and non-finite ones only as elements.
class Histogram {
  public:
    Histogram() : bins_(kBins) {}
    template <class Value>
    void add(Value value) {
        ++elements_;
        const uint32_t bits = bit_cast<uint32_t>(static_cast<float>(absolute(value)));
        if (bits > 0 && bits < 0x7f800000U) ++bins_[bits >> kBinShift];
    }
    // About the magnitude that `density` of the elements reach or exceed: linear inside a bin.
    double quantile(double density) const {
        const double want = density * static_cast<double>(elements_);
        uint64_t above = 0;
        double lowest = 0;
        for (unsigned bin = kBins; bin-- > 0;) {
            const uint64_t inside = bins_[bin];
            if (inside == 0) continue;
            const double low = bin_edge(bin);
            const double high = bin_edge(bin + 1);
            if (static_cast<double>(above + inside) >= want)
                return high - (high - low) * ((want - static_cast<double>(above)) / static_cast<double>(inside));
            above += inside;
            lowest = low;
        }
        return lowest;
    }

  private:
    std::vector<uint32_t> bins_;
    uint64_t elements_ = 0;
};

// Reads groups of 16 updates, in order, from a sequence of arrays.
template <class Residual>
class UpdateGroups {
  public:
    explicit UpdateGroups(const std::vector<ConstArray>* arrays) : arrays_(arrays) {}
    void read(uint64_t first, uint64_t count, Residual* out) {
        for (uint64_t i = 0; i < count; ++i) out[i] = arrays_ ? at(first + i) : Residual{0};
    }

  private:
    Residual at(uint64_t element) {
        while (element - begin_ >= (*arrays_)[index_].numel) begin_ += (*arrays_)[index_++].numel;
        const ConstArray& array = (*arrays_)[index_];
        const uint64_t i = element - begin_;
        switch (array.dtype) {
            case Dtype::kFloat32: return to_scalar<Residual>(static_cast<const float*>(array.data)[i]);
            case Dtype::kFloat64: return to_scalar<Residual>(static_cast<const double*>(array.data)[i]);
            case Dtype::kFloat16: return to_scalar<Residual>(static_cast<const Half*>(array.data)[i]);
            case Dtype::kBfloat16: return to_scalar<Residual>(static_cast<const Bfloat16*>(array.data)[i]);
            case Dtype::kNone: break;
        }
        return Residual{0};
    }
    const std::vector<ConstArray>* arrays_;
    size_t index_ = 0;
    uint64_t begin_ = 0;
};

// What pass 1 will leave of a residual and an update.
template <class Residual>
Residual residual_after(Residual before, Residual update, Residual threshold) {
    Residual sum = before + update;
    if (!is_finite(sum)) sum = is_finite(before) ? before : is_finite(update) ? update : Residual{0};
    if (absolute(sum) >= threshold) sum -= sum < 0 ? -threshold : threshold;
    return sum;
}

}  // namespace

template <class Residual>
Tail measure_tail(const Residual* residual, uint64_t numel, const std::vector<ConstArray>* update, Residual threshold,
                  double density) {
    Tail tail;
    if (numel == 0) return tail;
    const uint64_t stride = ((numel + kSampled - 1) / kSampled | 1) * kGroup;
    Histogram now, shuffled, next, same;
    uint64_t agreeing = 0;
    uint64_t opposing = 0;
    UpdateGroups<Residual> updates(update);
    for (uint64_t first = 0; first < numel; first += stride) {
        const uint64_t count = std::min(kGroup, numel - first);
        Residual added[kGroup];
        updates.read(first, count, added);
        for (uint64_t i = 0; i < count; ++i) {
            const Residual partner = added[(i ^ 8) < count ? i ^ 8 : i];
            const Residual before = residual[first + i];
            now.add(before + added[i]);
            shuffled.add(before + partner);
            // Where the caller has added its update already, what an update does is unknown: expect the same again.
            const Residual after = update ? residual_after(before, added[i], threshold) : before;
            next.add(after + partner);
            same.add(after + added[i]);
            agreeing += (before > 0 && added[i] > 0) || (before < 0 && added[i] < 0);
            opposing += (before > 0 && added[i] < 0) || (before < 0 && added[i] > 0);
        }
    }
    tail = {now.quantile(density), shuffled.quantile(density), next.quantile(density), same.quantile(density), 0.5};
    if (agreeing + opposing > 0) tail.agreement = static_cast<double>(agreeing) / static_cast<double>(agreeing + opposing);
    return tail;
}

template Tail measure_tail<float>(const float*, uint64_t, const std::vector<ConstArray>*, float, double);
template Tail measure_tail<double>(const double*, uint64_t, const std::vector<ConstArray>*, double, double);

}  // namespace gradwire
