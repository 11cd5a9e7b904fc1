// Marks functions that nvcc compiles for the host and for the device.
#pragma once

#if defined(__CUDACC__)
#define GRADWIRE_HD __host__ __device__
#else
#define GRADWIRE_HD
#endif
