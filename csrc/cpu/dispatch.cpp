#include <atomic>
#include <cstdlib>

#include "../common/error.h"
#include "kernels.h"
#if defined(GRADWIRE_X86)
#include <cpuid.h>
#endif

namespace gradwire {
namespace {

#if defined(GRADWIRE_X86)
// Add the tables of the instruction sets that the processor has and whose registers the system saves. Not by
// __builtin_cpu_supports, which answers no to everything in the runtime of zig, the compiler of the wheels.
void add_x86_tables(std::vector<const Kernels*>& tables) {
    constexpr unsigned kOsXsave = 1U << 27;                                      // leaf 1, ecx
    constexpr unsigned kAvx2Bits = 1U << 5 | 1U << 8;                            // leaf 7, ebx: AVX2, BMI2
    constexpr unsigned kAvx512Bits = 1U << 16 | 1U << 17 | 1U << 30 | 1U << 31;  // F, DQ, BW, VL
    constexpr unsigned kYmm = 0x06, kZmm = 0xe6;                                 // XCR0
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kOsXsave)) return;
    unsigned saved = 0, upper = 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return;
    // Every processor with AVX2 and BMI2 has F16C and LZCNT too.
    if ((ebx & kAvx2Bits) != kAvx2Bits || (saved & kYmm) != kYmm) return;
    tables.push_back(&kAvx2Kernels);
    if ((ebx & kAvx512Bits) == kAvx512Bits && (saved & kZmm) == kZmm) tables.push_back(&kAvx512Kernels);
}
#endif

std::vector<const Kernels*> usable_tables() {
    std::vector<const Kernels*> tables{&kScalarKernels};
#if defined(GRADWIRE_X86)
    add_x86_tables(tables);
#endif
#if defined(GRADWIRE_ARM)
    tables.push_back(&kNeonKernels);
#endif
    return tables;
}

const Kernels& find_table(const std::string& name) {
    std::string names;
    for (const Kernels* table : usable_tables()) {
        if (name == table->name) return *table;
        names += std::string(names.empty() ? "" : ", ") + table->name;
    }
    throw BackendUnavailable("instruction set \"" + name + "\" is not usable here; usable: " + names +
                             " (set GRADWIRE_ISA to one of them, or unset it)");
}

const Kernels& chosen_table() {
    const char* forced = std::getenv("GRADWIRE_ISA");
    return forced && *forced ? find_table(forced) : *usable_tables().back();
}

std::atomic<const Kernels*> table_in_use{nullptr};

}  // namespace

const Kernels& kernels() {
    const Kernels* table = table_in_use.load(std::memory_order_relaxed);
    if (!table) {
        table = &chosen_table();
        table_in_use.store(table, std::memory_order_relaxed);
    }
    return *table;
}

std::vector<std::string> usable_isas() {
    std::vector<std::string> names;
    for (const Kernels* table : usable_tables()) names.emplace_back(table->name);
    return names;
}

void select_isa(const std::string& name) { table_in_use.store(&find_table(name), std::memory_order_relaxed); }

}  // namespace gradwire
