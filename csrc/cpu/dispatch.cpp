#include <atomic>
#include <cstdlib>

#include "../common/error.h"
#include "kernels.h"

namespace gradwire {
namespace {

std::vector<const Kernels*> usable_tables() {
    std::vector<const Kernels*> tables{&kScalarKernels};
#if defined(GRADWIRE_X86)
    __builtin_cpu_init();
    // Every processor with AVX2 and BMI2 has F16C and LZCNT too.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) {
        tables.push_back(&kAvx2Kernels);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            tables.push_back(&kAvx512Kernels);
    }
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
