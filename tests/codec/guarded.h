// What the C interfaces for ctypes share: functions return 0, or a negative number after an exception, whose text
// last_error() gives: -1 for a FormatError, -2 for any other.
#pragma once

#include <exception>
#include <string>

#include "codec.h"

thread_local std::string error_text;

template <class Action>
int guarded(Action action) {
  try {
    action();
    return 0;
  } catch (const zipccl::FormatError& error) {
    error_text = error.what();
    return -1;
  } catch (const std::exception& error) {
    error_text = error.what();
    return -2;
  }
}

extern "C" const char* last_error() { return error_text.c_str(); }
