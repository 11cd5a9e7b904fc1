// Patterns of changed elements: random ones at any density, and arrangements that are difficult to encode.
#pragma once

#include "support.h"

namespace patterns {

using support::Entries;
using support::Random;

// Call changes(i) for every element, in order.
template <class F>
Entries choose(uint64_t numel, Random& random, F changes) {
    Entries entries;
    entries.numel = numel;
    for (uint64_t i = 0; i < numel; ++i)
        if (changes(i)) entries.add(i, random.chance(0.5));
    return entries;
}

inline Entries at_density(uint64_t numel, double density, Random& random) {
    return choose(numel, random, [&](uint64_t) { return random.chance(density); });
}

// Call f(entries) for every pattern of about `numel` elements.
template <class F>
void for_every_pattern(uint64_t numel, Random& random, F f) {
    const auto try_one = [&](const char* name, const Entries& entries) {
        const check::Note note("pattern", name);
        f(entries);
    };
    const auto periodic = [&](const char* name, uint64_t period, uint64_t changed, uint64_t shift) {
        try_one(name, choose(numel, random, [&](uint64_t i) { return (i + shift) % period < changed; }));
    };
    for (const double density :
         {1e-4, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.64, 0.66, 0.75, 0.9, 0.97, 0.999})
        try_one("random", at_density(numel, density, random));
    try_one("none", choose(numel, random, [](uint64_t) { return false; }));
    try_one("all", choose(numel, random, [](uint64_t) { return true; }));
    try_one("all but the first", choose(numel, random, [](uint64_t i) { return i > 0; }));
    try_one("all but the last", choose(numel, random, [&](uint64_t i) { return i + 1 < numel; }));
    try_one("the first", choose(numel, random, [](uint64_t i) { return i == 0; }));
    try_one("the last", choose(numel, random, [&](uint64_t i) { return i + 1 == numel; }));
    try_one("first half", choose(numel, random, [&](uint64_t i) { return i < numel / 2; }));
    try_one("second half", choose(numel, random, [&](uint64_t i) { return i >= numel / 2; }));
    try_one("sparse, then full", choose(numel, random, [&](uint64_t i) { return i >= numel / 2 || i % 97 == 0; }));
    try_one("full, then sparse", choose(numel, random, [&](uint64_t i) { return i < numel / 2 || i % 97 == 0; }));
    periodic("alternating", 2, 1, 0);
    periodic("alternating, from the second", 2, 1, 1);
    periodic("one of 64, first", 64, 1, 0);
    periodic("one of 64, last", 64, 1, 1);
    periodic("one of 65", 65, 1, 3);
    periodic("runs of 64", 128, 64, 0);
    periodic("runs of 63", 127, 63, 1);
    periodic("63 of 64", 64, 63, 0);
    periodic("runs of 256 far apart", 1777, 256, 0);
    periodic("runs of 257 far apart", 1777, 257, 5);
    periodic("just below the inverted polarity", 20, 12, 0);
    periodic("at the inverted polarity", 20, 13, 0);
    // The most expensive chunks: as many unchanged elements as the polarity allows, scattered.
    try_one("at random near the inverted polarity", at_density(numel, 0.651, random));
    bool on = false;
    try_one("random runs", choose(numel, random, [&](uint64_t) { return on = random.chance(0.02) ? !on : on; }));
    // The distances of every second chunk are much longer than those of the others.
    try_one("uneven", choose(numel, random,
                             [&](uint64_t i) { return i / 600 % 2 == 0 ? random.chance(0.8) : random.chance(0.01); }));
}

// Return exactly `changed` elements, with distances up to `farthest`, followed by `behind` more elements.
inline Entries with_count(uint64_t changed, uint64_t farthest, uint64_t behind, Random& random) {
    Entries entries;
    uint64_t next = 0;
    for (uint64_t i = 0; i < changed; ++i) {
        next += random.below(farthest + 1);
        entries.add(next++, random.chance(0.5));
    }
    entries.numel = next + behind;
    return entries;
}

}  // namespace patterns
