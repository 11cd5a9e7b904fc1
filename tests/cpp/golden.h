// The messages in tests/golden; the build defines the path of the folder.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "support.h"

namespace support {

// Call f(bytes) with each message in a folder of tests/golden; return their number.
template <class F>
unsigned for_every_golden(const char* folder, F f) {
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(GRADWIRE_GOLDEN) / folder))
        if (entry.path().extension() == ".bin") paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    for (const std::filesystem::path& path : paths) {
        const std::string name = path.stem().string();
        const check::Note note("golden file", name.c_str());
        std::ifstream file(path, std::ios::binary);
        Bytes bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
        bytes.shrink_to_fit();
        f(bytes);
    }
    return static_cast<unsigned>(paths.size());
}

}  // namespace support
