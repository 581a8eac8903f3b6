// The kinds of error that Fulmen throws; all derive from fulmen::Error, a std::runtime_error.
#pragma once

#include "core/error.h"
