#include "executors/default_list.h"

#include "executors/reference/reference.h"

namespace fulmen {

ExecutorList default_executors() {
  return {reference::make_reference_executor()};
}

}  // namespace fulmen
