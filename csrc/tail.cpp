#include "tail.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "array_cursor.h"

namespace gradwire {
namespace {

constexpr double kExceeding = 640;  // wanted in the sample; a third is left where the stride is just above 1
constexpr double kSampledMin = 4096;
constexpr double kSampledMax = uint64_t{1} << 18;
constexpr unsigned kFineShift = 17;    // 64 bins to the octave: the upper 15 bits of a float32
constexpr unsigned kCoarseShift = 19;  // 16 bins to the octave
constexpr unsigned kAllBins = kTailInfinity >> kFineShift;
constexpr unsigned kWindowBins = 2048;  // 32 octaves
constexpr uint64_t kCoarseEvery = 16;   // groups, of those that are sampled, that the first look takes

// Goes over the sampled groups.
template <class Residual>
class Sample {
  public:
    Sample(const Residual* residual, uint64_t numel, const std::vector<ConstArray>* update, Residual threshold,
           double density)
        : residual_(residual),
          numel_(numel),
          update_(update),
          threshold_(threshold),
          stride_(tail_stride(numel, density)) {}

    // The quantiles that differ: without an update all four ask the same of the same values.
    size_t quantiles() const { return update_ ? kTailQuantiles : 1; }

    // Calls visit(group, elements) for every `every`-th of them, with what is at least the `cuts`.
    template <class Visit>
    void for_each(uint64_t every, const uint32_t (&cuts)[kTailQuantiles], Visit visit) const {
        const auto measure = measure_function(Residual{});
        const auto measure_alone = measure_alone_function(Residual{});
        const uint64_t stride = stride_ * every;
        static const std::vector<ConstArray> kNothing;
        ArrayCursor updates(update_ ? *update_ : kNothing, 0);
        TailGroup group{};
        for (uint64_t first = 0; first < numel_; first += stride) {
            const uint64_t count = std::min(kTailGroup, numel_ - first);
            const Residual* before = residual_ + first;
            Residual copies[2][kTailGroup];
            if (count < kTailGroup) before = copy_of(before, count, copies[0]);
            if (update_) {
                const Residual* added = take_from(updates, count, copies[1]);
                updates.advance(stride - count);
                measure(before, added, count, threshold_, true, cuts, &group);
            } else {
                measure_alone(before, count, cuts[0], &group);
            }
            visit(group, count);
        }
    }

  private:
    static const Residual* copy_of(const Residual* values, uint64_t count, Residual* copy) {
        std::fill(std::copy_n(values, count, copy), copy + kTailGroup, Residual{0});
        return copy;
    }
    static const Residual* take_from(ArrayCursor& updates, uint64_t count, Residual* copy) {
        if (const Residual* values = updates.in_place<Residual>(kTailGroup)) {
            updates.advance(count);
            return values;
        }
        std::fill_n(copy, kTailGroup, Residual{0});
        updates.gather(count, copy);
        return copy;
    }
    static MeasureGroupFunction<float> measure_function(float) { return kernels().measure_group_float; }
    static MeasureGroupFunction<double> measure_function(double) { return kernels().measure_group_double; }
    static MeasureResidualsFunction<float> measure_alone_function(float) { return kernels().measure_residuals_float; }
    static MeasureResidualsFunction<double> measure_alone_function(double) {
        return kernels().measure_residuals_double;
    }

    const Residual* residual_;
    uint64_t numel_;
    const std::vector<ConstArray>* update_;
    Residual threshold_;
    uint64_t stride_;
};

// Counts magnitudes in bins of their bits' upper part, in a window of bins. Zero and non-finite ones are never counted.
class Histogram {
  public:
    void begin_at(unsigned shift, unsigned lowest_bin, unsigned most_bins) {
        shift_ = shift;
        lowest_ = highest_ = lowest_bin;
        bins_.assign(std::min(most_bins, (kTailInfinity >> shift) - lowest_bin), 0);
        beyond_ = false;
    }
    // The least that is counted.
    uint32_t cut() const { return std::max(1U, lowest_ << shift_); }
    void add(const uint32_t (&bits)[kTailGroup], uint32_t exceeding) {
        for (; exceeding != 0; exceeding &= exceeding - 1) add_one(bits[__builtin_ctz(exceeding)] >> shift_);
    }
    // Finds the bin that holds the element of rank `want` from above, and how many lie above that bin.
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
    // The lowest bin with anything in it, or 0.
    unsigned lowest_filled() const {
        for (unsigned bin = lowest_; bin <= highest_; ++bin)
            if (inside(bin) > 0) return bin;
        return 0;
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
    unsigned shift_ = kFineShift;
    unsigned lowest_ = 0;
    unsigned highest_ = 0;
    bool beyond_ = false;
};

double bin_edge(unsigned bin) { return bit_cast<float>(std::min(bin << kFineShift, kTailInfinity - 1)); }

// About the magnitude that `want` elements reach or exceed: linear inside a bin. False where the window was too small
// to tell.
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

struct Counted {
    uint64_t elements = 0;
    uint64_t agreeing = 0;
    uint64_t opposing = 0;
};

template <class Residual>
Counted count(const Sample<Residual>& sample, uint64_t every, Histograms& histograms) {
    uint32_t cuts[kTailQuantiles];
    for (size_t q = 0; q < histograms.size(); ++q) cuts[q] = histograms[q].cut();
    Counted counted;
    sample.for_each(every, cuts, [&](const TailGroup& group, uint64_t elements) {
        counted.elements += elements;
        counted.agreeing += group.agreeing;
        counted.opposing += group.opposing;
        for (size_t q = 0; q < histograms.size(); ++q) histograms[q].add(group.bits[q], group.exceeding[q]);
    });
    return counted;
}

// A first look at a few groups says from where on to count: only the tail is wanted, and most magnitudes are below.
template <class Residual>
void choose_windows(const Sample<Residual>& sample, double density, Histograms& histograms) {
    for (Histogram& histogram : histograms) histogram.begin_at(kCoarseShift, 0, kAllBins);
    const Counted counted = count(sample, kCoarseEvery, histograms);
    for (Histogram& histogram : histograms) {
        unsigned bin;
        uint64_t above;
        const bool found = histogram.find(1.5 * density * static_cast<double>(counted.elements) + 8, bin, above);
        histogram.begin_at(kFineShift, found ? bin << (kCoarseShift - kFineShift) : 0, found ? kWindowBins : kAllBins);
    }
}

// Measures in the given windows; false where one was too small.
template <class Residual>
bool measure(const Sample<Residual>& sample, double density, Histograms& histograms, Tail& tail) {
    const Counted counted = count(sample, 1, histograms);
    const double want = density * static_cast<double>(counted.elements);
    const uint64_t either = counted.agreeing + counted.opposing;
    tail.agreement = either > 0 ? static_cast<double>(counted.agreeing) / static_cast<double>(either) : 0.5;
    double* const found[kTailQuantiles] = {&tail.now, &tail.shuffled, &tail.next, &tail.same};
    for (size_t q = 0; q < histograms.size(); ++q)
        if (!find_quantile(histograms[q], want, *found[q])) return false;
    for (size_t q = histograms.size(); q < kTailQuantiles; ++q) *found[q] = tail.now;
    return true;
}

}  // namespace

uint64_t tail_stride(uint64_t numel, double density) {
    const double wanted = std::ceil(std::min(std::max(kExceeding / density, kSampledMin), kSampledMax));
    const auto sampled = static_cast<uint64_t>(wanted);
    return ((numel + sampled - 1) / sampled | 1) * kTailGroup;
}

template <class Residual>
Tail measure_tail(const Residual* residual, uint64_t numel, const std::vector<ConstArray>* update, Residual threshold,
                  double density) {
    Tail tail;
    if (numel == 0) return tail;
    const Sample<Residual> sample(residual, numel, update, threshold, density);
    Histograms histograms(sample.quantiles());
    choose_windows(sample, density, histograms);
    if (measure(sample, density, histograms, tail)) return tail;
    for (Histogram& histogram : histograms) histogram.begin_at(kFineShift, 0, kAllBins);
    measure(sample, density, histograms, tail);
    return tail;
}

template Tail measure_tail<float>(const float*, uint64_t, const std::vector<ConstArray>*, float, double);
template Tail measure_tail<double>(const double*, uint64_t, const std::vector<ConstArray>*, double, double);

}  // namespace gradwire
