// What the bindings of the archive and of its promoter share.
#pragma once
#include "csrc/handles.h"
#include "csrc/tensors.h"
#include "ops_cpu/archive.h"

namespace kvq {

Handles<Archive>& archives();

ScalarType scalar_type(Float type);

}  // namespace kvq
