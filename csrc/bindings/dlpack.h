// The parts of the DLPack ABI that the bindings use. Source: the DLPack specification, C API, versions 0.8 and 1.0.
#pragma once

#include <cstdint>

namespace gradwire::bindings {

inline constexpr int kDlpackCpu = 1;
inline constexpr int kDlpackCuda = 2;
inline constexpr int kDlpackCudaManaged = 13;
inline constexpr uint8_t kDlpackUnsigned = 1;
inline constexpr uint8_t kDlpackFloat = 2;
inline constexpr uint8_t kDlpackBfloat = 4;
inline constexpr uint64_t kDlpackReadOnly = 1;

struct DlpackDevice {
    int32_t type;
    int32_t id;
};

struct DlpackDtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct DlpackTensor {
    void* data;
    DlpackDevice device;
    int32_t ndim;
    DlpackDtype dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};

struct DlpackManaged {
    DlpackTensor tensor;
    void* manager_ctx;
    void (*deleter)(DlpackManaged*);
};

struct DlpackVersioned {
    uint32_t major;
    uint32_t minor;
    void* manager_ctx;
    void (*deleter)(DlpackVersioned*);
    uint64_t flags;
    DlpackTensor tensor;
};

}  // namespace gradwire::bindings
