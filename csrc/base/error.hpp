// Errors of the engine. Messages name the link, the peer and the missing thing.
#pragma once

#include <stdexcept>

namespace pipemorph {

struct EngineError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct EngineTimeout : EngineError {
    using EngineError::EngineError;
};

}  // namespace pipemorph
