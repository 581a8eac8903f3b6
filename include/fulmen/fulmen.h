// Fulmen for C++ programs: everything public. No Python and no libtorch is needed.
#pragma once

#include "fulmen/claims.h"
#include "fulmen/errors.h"
#include "fulmen/function.h"
#include "fulmen/tensor.h"
