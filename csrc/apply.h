// Decoding messages onto targets.
#pragma once

#include <vector>

#include "common/arrays.h"
#include "common/partition.h"
#include "message.h"

namespace gradwire {

// More arrays like the targets. They hold the message of index `own` already; an index beyond the last stands for none.
struct SecondTarget {
    std::vector<Array> targets;
    size_t own;
};

// targets += scale * decoded for every message in order, in one pass over the targets, in parts on up to `threads`
// threads; the bits do not depend on the number of threads. A second target gets the same, with the factor scale - 1
// for its own message: nothing where that is 0. The messages are those of `part` of the targets' elements. All payloads
// are validated before the first write. Throw MessageError, also for another numel.
void apply_messages(const std::vector<MessageView>& messages, const std::vector<Array>& targets, const Part& part,
                    double scale, const SecondTarget* second = nullptr, unsigned threads = 1);

// The same for messages of all elements.
inline void apply_messages(const std::vector<MessageView>& messages, const std::vector<Array>& targets, double scale,
                           const SecondTarget* second = nullptr, unsigned threads = 1) {
    apply_messages(messages, targets, {undivided(total_numel(targets)), 0}, scale, second, threads);
}

struct Momentum {
    std::vector<Array> velocity;  // like the targets
    double factor;
};

// Apply with Nesterov momentum: added = scale * (sum of all decoded), velocity = factor * (velocity + added), targets
// += added + velocity. A second target gets the same, less its own message. Threads, validation and errors as above.
void apply_with_momentum(const std::vector<MessageView>& messages, const std::vector<Array>& targets, double scale,
                         const Momentum& momentum, const SecondTarget* second = nullptr, unsigned threads = 1);

}  // namespace gradwire
