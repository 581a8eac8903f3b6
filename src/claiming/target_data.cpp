#include "claiming/target_data.h"

namespace fulmen {

namespace {

constexpr ShippedTarget targets[] = {
    {"h200", 90, false,
     R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536)"
     R"(,"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152)"
     R"(,"maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024)"
     R"(,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048)"
     R"(,"pciDeviceId":6,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":150109880320)"
     R"(,"smClockRateKHz":1980000,"memClockRateKHz":3201000,"l2CacheSize":62914560,"cudaDeviceId":0)"
     R"(,"deviceVer":900,"driverVer":13000,"deviceName":"NVIDIA H200"})"},
    {"h100", 90, true,
     R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536)"
     R"(,"multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152)"
     R"(,"maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024)"
     R"(,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048)"
     R"(,"pciDeviceId":6,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":85024112640)"
     R"(,"smClockRateKHz":1980000,"memClockRateKHz":2619000,"l2CacheSize":52428800,"cudaDeviceId":0)"
     R"(,"deviceVer":900,"driverVer":13000,"deviceName":"NVIDIA H100 80GB HBM3"})"},
    {"a100", 80, true,
     R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536)"
     R"(,"multiProcessorCount":108,"warpSize":32,"maxSharedMemoryPerBlock":49152)"
     R"(,"maxSharedMemoryPerBlockOptin":166912,"reservedSharedMemoryPerBlock":1024)"
     R"(,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048)"
     R"(,"pciDeviceId":6,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":85097971712)"
     R"(,"smClockRateKHz":1410000,"memClockRateKHz":1593000,"l2CacheSize":41943040,"cudaDeviceId":0)"
     R"(,"deviceVer":800,"driverVer":13000,"deviceName":"NVIDIA A100-SXM4-80GB"})"},
    {"l40s", 89, true,
     R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536)"
     R"(,"multiProcessorCount":142,"warpSize":32,"maxSharedMemoryPerBlock":49152)"
     R"(,"maxSharedMemoryPerBlockOptin":101376,"reservedSharedMemoryPerBlock":1024)"
     R"(,"maxRegistersPerSM":65536,"maxCtasPerSM":24,"maxThreadsPerBlock":1024,"maxThreadsPerSM":1536)"
     R"(,"pciDeviceId":6,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":47810936832)"
     R"(,"smClockRateKHz":2520000,"memClockRateKHz":9001000,"l2CacheSize":100663296,"cudaDeviceId":0)"
     R"(,"deviceVer":890,"driverVer":13000,"deviceName":"NVIDIA L40S"})"},
    {"b200", 100, true,
     R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536)"
     R"(,"multiProcessorCount":148,"warpSize":32,"maxSharedMemoryPerBlock":49152)"
     R"(,"maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024)"
     R"(,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048)"
     R"(,"pciDeviceId":6,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":191503138816)"
     R"(,"smClockRateKHz":1965000,"memClockRateKHz":3996000,"l2CacheSize":132644864,"cudaDeviceId":0)"
     R"(,"deviceVer":1000,"driverVer":13000,"deviceName":"NVIDIA B200"})"},
    {"t4", 75, true,
     R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536)"
     R"(,"multiProcessorCount":40,"warpSize":32,"maxSharedMemoryPerBlock":49152)"
     R"(,"maxSharedMemoryPerBlockOptin":65536,"reservedSharedMemoryPerBlock":0)"
     R"(,"maxRegistersPerSM":65536,"maxCtasPerSM":16,"maxThreadsPerBlock":1024,"maxThreadsPerSM":1024)"
     R"(,"pciDeviceId":6,"isTccDriver":0,"supportCoopLaunch":1,"totalGlobalMem":15828320256)"
     R"(,"smClockRateKHz":1590000,"memClockRateKHz":5001000,"l2CacheSize":4194304,"cudaDeviceId":0)"
     R"(,"deviceVer":750,"driverVer":13000,"deviceName":"Tesla T4"})"},
};

}  // namespace

std::span<const ShippedTarget> shipped_targets() { return targets; }

}  // namespace fulmen
