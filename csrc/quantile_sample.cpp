#include "quantile_sample.h"

#include <algorithm>

#include "array_cursor.h"
#include "cpu/kernels.h"

namespace gradwire {
namespace {

constexpr unsigned kCoarseShift = 19;   // 16 bins to the octave
constexpr unsigned kWindowBins = 2048;  // 32 octaves
constexpr uint64_t kCoarseEvery = 16;   // sampled groups for each one of the coarse histogram

template <class Residual>
class SampledGroups {
  public:
    SampledGroups(const Residual* residual, bool is_gathered, uint64_t numel, const std::vector<ConstArray>* update,
                  Levels<Residual> levels, double density, uint64_t turn)
        : numel_(numel),
          update_(update),
          levels_(levels),
          stride_(sample_stride(numel, density)),
          first_(first_sampled(stride_, turn)),
          residual_(residual),
          begin_(is_gathered ? 0 : first_),
          distance_(is_gathered ? kSampleGroup : stride_) {}

    // Return the number of quantiles that differ: without an update all four are the same.
    size_t quantiles() const { return update_ ? kSampleQuantiles : 1; }

    // Call visit(group, elements) for every `every`-th group; elements below the `cuts` are not marked as exceeding.
    template <class Visit>
    void for_each(uint64_t every, const uint32_t (&cuts)[kSampleQuantiles], Visit visit) const {
        const ValueKernels<Residual>& kernels = value_kernels<Residual>();
        const uint64_t stride = stride_ * every;
        ArrayCursor updates(update_, first_);
        SampleGroup group{};
        uint64_t at = begin_;
        for (uint64_t first = first_; first < numel_; first += stride, at += distance_ * every) {
            const uint64_t count = std::min(kSampleGroup, numel_ - first);
            const Residual* before = residual_ + at;
            Residual copies[2][kSampleGroup];
            if (count < kSampleGroup) before = copy_of(before, count, copies[0]);
            if (update_) {
                const Residual* added = next_updates(updates, count, copies[1]);
                updates.advance(stride - count);
                kernels.measure_group(before, added, count, levels_, true, cuts, &group);
            } else {
                kernels.measure_residuals(before, count, cuts[0], &group);
            }
            visit(group, count);
        }
    }

  private:
    static const Residual* copy_of(const Residual* values, uint64_t count, Residual* copy) {
        std::fill(std::copy_n(values, count, copy), copy + kSampleGroup, Residual{0});
        return copy;
    }
    static const Residual* next_updates(ArrayCursor& updates, uint64_t count, Residual* copy) {
        if (const Residual* values = updates.in_place<Residual>(kSampleGroup)) {
            updates.advance(count);
            return values;
        }
        std::fill_n(copy, kSampleGroup, Residual{0});
        updates.gather(count, copy);
        return copy;
    }
    uint64_t numel_;
    const std::vector<ConstArray>* update_;
    Levels<Residual> levels_;
    uint64_t stride_;
    uint64_t first_;
    const Residual* residual_;
    uint64_t begin_;     // of the first group there
    uint64_t distance_;  // to the next
};

// Counts magnitudes by the upper part of their bits, in a window of bins. Zero and non-finite magnitudes are not
// counted.
class Histogram {
  public:
    void begin_at(unsigned shift, unsigned lowest_bin, unsigned bins_max) {
        shift_ = shift;
        lowest_ = highest_ = lowest_bin;
        bins_.assign(std::min(bins_max, (kInfinityBits >> shift) - lowest_bin), 0);
        beyond_ = false;
    }
    // Return the least bits that are counted.
    uint32_t cut() const { return std::max(1U, lowest_ << shift_); }
    void add(const uint32_t (&bits)[kSampleGroup], uint32_t exceeding) {
        for (; exceeding != 0; exceeding &= exceeding - 1) add_one(bits[__builtin_ctz(exceeding)] >> shift_);
    }
    // Find the bin that holds the element of rank `want` from above, and the number of elements above that bin.
    bool find(double want, unsigned& bin, uint64_t& above) const {
        above = 0;
        for (bin = highest_ + 1; bin-- > lowest_;) {
            const uint64_t here = inside(bin);
            if (here > 0 && static_cast<double>(above + here) >= want) return true;
            above += here;
        }
        return false;
    }
    uint64_t inside(unsigned bin) const { return bin - lowest_ < bins_.size() ? bins_[bin - lowest_] : 0; }
    // Return the lowest bin that is not empty, or 0.
    unsigned lowest_filled() const {
        for (unsigned bin = lowest_; bin <= highest_; ++bin)
            if (inside(bin) > 0) return bin;
        return 0;
    }
    // Return the floor of `now`, or 0: `_floor` in python/gradwire/reference.py.
    double floor(double want) const {
        uint64_t above = 0, weight = 0;
        unsigned top = 0;
        double floor = 0;
        for (unsigned bin = highest_ + 1; bin-- > lowest_;) {
            const uint64_t here = inside(bin);
            if (here == 0) continue;
            if (above == 0) top = bin;
            above += here;
            weight += here * bin_weight(bin, top);
            const bool is_reached = static_cast<double>(above) >= want;
            if (is_even(above, weight, bin, top)) {
                if (is_reached) return 0;
                floor = floor_of(above, weight, top);
            }
            if (is_reached) break;
        }
        return floor;
    }
    bool is_whole() const { return lowest_ == 0 && !beyond_; }
    bool is_cut_above() const { return beyond_; }

  private:
    void add_one(unsigned bin) {
        if (bin - lowest_ >= bins_.size()) {
            beyond_ = true;
            return;
        }
        ++bins_[bin - lowest_];
        highest_ = std::max(highest_, bin);
    }
    std::vector<uint32_t> bins_;
    unsigned shift_ = kBinShift;
    unsigned lowest_ = 0;
    unsigned highest_ = 0;
    bool beyond_ = false;
};

// Find about the magnitude that `want` elements reach or exceed, linearly inside a bin. Return false if the window was
// too small.
bool find_quantile(const Histogram& histogram, double want, double& quantile) {
    unsigned bin;
    uint64_t above;
    if (histogram.is_cut_above()) return false;
    if (histogram.find(want, bin, above)) {
        const double low = bin_edge(bin);
        const double high = bin_edge(bin + 1);
        quantile =
            high - (high - low) * ((want - static_cast<double>(above)) / static_cast<double>(histogram.inside(bin)));
        return true;
    }
    quantile = bin_edge(histogram.lowest_filled());
    return histogram.is_whole();
}

using Histograms = std::vector<Histogram>;  // one for each quantile that differs

struct Counts {
    uint64_t elements = 0;
    uint64_t agreeing = 0;
    uint64_t opposing = 0;
    uint64_t moving = 0;
};

template <class Residual>
Counts count(const SampledGroups<Residual>& sample, uint64_t every, Histograms& histograms) {
    uint32_t cuts[kSampleQuantiles];
    for (size_t q = 0; q < histograms.size(); ++q) cuts[q] = histograms[q].cut();
    Counts counted;
    sample.for_each(every, cuts, [&](const SampleGroup& group, uint64_t elements) {
        counted.elements += elements;
        counted.agreeing += group.agreeing;
        counted.opposing += group.opposing;
        counted.moving += group.moving;
        for (size_t q = 0; q < histograms.size(); ++q) histograms[q].add(group.bits[q], group.exceeding[q]);
    });
    return counted;
}

// Choose the windows by a coarse histogram of a few groups: only the largest magnitudes matter, and most are below.
template <class Residual>
void choose_windows(const SampledGroups<Residual>& sample, double density, Histograms& histograms) {
    for (Histogram& histogram : histograms) histogram.begin_at(kCoarseShift, 0, kBins);
    const Counts counted = count(sample, kCoarseEvery, histograms);
    for (Histogram& histogram : histograms) {
        unsigned bin;
        uint64_t above;
        const bool found = histogram.find(1.5 * density * static_cast<double>(counted.elements) + 8, bin, above);
        histogram.begin_at(kBinShift, found ? bin << (kCoarseShift - kBinShift) : 0, found ? kWindowBins : kBins);
    }
}

// Measure in the given windows; return false if one was too small.
template <class Residual>
bool measure(const SampledGroups<Residual>& sample, double density, Histograms& histograms,
             SampledQuantiles& quantiles) {
    const Counts counted = count(sample, 1, histograms);
    const double want = density * static_cast<double>(counted.elements);
    const uint64_t either = counted.agreeing + counted.opposing;
    quantiles.moving = static_cast<double>(counted.moving) / static_cast<double>(counted.elements);
    quantiles.agreement = either > 0 ? static_cast<double>(counted.agreeing) / static_cast<double>(either) : 0.5;
    double* const found[kSampleQuantiles] = {&quantiles.now, &quantiles.shuffled, &quantiles.next, &quantiles.same};
    for (size_t q = 0; q < histograms.size(); ++q)
        if (!find_quantile(histograms[q], want, *found[q])) return false;
    for (size_t q = histograms.size(); q < kSampleQuantiles; ++q) *found[q] = quantiles.now;
    quantiles.floor = histograms[0].floor(want);
    return true;
}

}  // namespace

template <class Residual>
SampledQuantiles sample_quantiles(const Residual* residual, bool is_gathered, uint64_t numel,
                                  const std::vector<ConstArray>* update, Levels<Residual> levels, double density,
                                  uint64_t turn) {
    SampledQuantiles quantiles;
    if (numel == 0) return quantiles;
    const SampledGroups<Residual> sample(residual, is_gathered, numel, update, levels, density, turn);
    Histograms histograms(sample.quantiles());
    choose_windows(sample, density, histograms);
    if (measure(sample, density, histograms, quantiles)) return quantiles;
    for (Histogram& histogram : histograms) histogram.begin_at(kBinShift, 0, kBins);
    measure(sample, density, histograms, quantiles);
    return quantiles;
}

template SampledQuantiles sample_quantiles(const float*, bool, uint64_t, const std::vector<ConstArray>*, Levels<float>,
                                           double, uint64_t);
template SampledQuantiles sample_quantiles(const double*, bool, uint64_t, const std::vector<ConstArray>*,
                                           Levels<double>, double, uint64_t);

}  // namespace gradwire
