#include "executors/default_list.h"

#include "executors/cpu/cpu.h"
#include "executors/cudnn/cudnn.h"
#include "executors/onednn/onednn.h"
#include "executors/reference/reference.h"

namespace fulmen {

ExecutorList default_executors(const std::vector<std::string>& library_folders) {
  cudnn::Options cudnn_options = cudnn::options_from_environment();
  cudnn_options.search_folders.insert(cudnn_options.search_folders.end(), library_folders.begin(), library_folders.end());
  return {
      // First for CUDA: attention, claimed only when both directions are proven.
      cudnn::make_executor(std::make_shared<const cudnn::Context>(std::move(cudnn_options))),
      // This machine's CPU.
      cpu::make_cpu_executor(),
      // Convolutions, which the CPU executor has no kernels of its own for.
      onednn::make_onednn_executor(),
      // Takes every primitive on the CPU, so that every program runs.
      reference::make_reference_executor(),
  };
}

}  // namespace fulmen
