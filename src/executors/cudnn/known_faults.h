// Faults of cuDNN versions that the library doesn't know of: calls that it accepts and computes wrongly, from public
// reports. A row says where the fault is and what keeps a call away from it: `pass_lengths` gives the kernel constant
// sequence lengths, which close the tails of the last tiles (the reports' own way out, and cudnn-frontend's for
// versions up to 9.15); `repeat_mask_row` gives it a mask with a row for every query, by stride 0; `refuse` leaves the
// call to the next executor. Delete a row when no supported version has it.
// Options::ignored_faults leaves rows out: tests/gpu/fault_probe.cpp measures with it which calls still need them.
#pragma once

#include <span>
#include <string_view>

#include "executors/cudnn/problem.h"

namespace fulmen::cudnn {

enum class Cure { pass_lengths, repeat_mask_row, refuse };

struct KnownFault {
  std::string_view id;
  int first_version;  // cudnnGetVersion(), such as 91900
  int last_version;   // inclusive
  int compute_capability;  // 0: any
  Cure cure;
  std::string_view what;  // for the refusal and the plan's steps
  std::string_view link;
  bool (*hits)(const Problem& problem);
};

std::span<const KnownFault> known_faults();

// The fault that a problem would meet: rows to be refused first. Null if there is none, or it is cured already. `ignored`:
// ids of rows to leave out, separated by commas.
const KnownFault* find_fault(const Problem& problem, int version, int compute_capability, std::string_view ignored = {});

// The row that refuses the problem, null if none does.
const KnownFault* refusing_fault(const Problem& problem, int version, int compute_capability, std::string_view ignored = {});

// The problem with the cures of its faults applied, each being a step that `explain` shows.
Problem cured(Problem problem, int version, int compute_capability, std::string_view ignored = {});

}  // namespace fulmen::cudnn
