// Errors by value: 0 or a positive errno, never an exception across a thread.
#pragma once

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

namespace fpfs {

// The text of a positive errno, from any thread.
inline std::string error_text(int error) { return std::generic_category().message(error); }

// A Status is 0 (success) or an errno, with an optional message for the log.
class [[nodiscard]] Status {
 public:
  Status() = default;
  explicit Status(int error, std::string message = {})
      : error_(error), message_(std::move(message)) {}

  static Status from_errno(const std::string& what) {
    const int error = errno;
    return Status(error, what + ": " + error_text(error));
  }

  bool ok() const { return error_ == 0; }
  int error() const { return error_; }
  const std::string& message() const { return message_; }

 private:
  int error_ = 0;
  std::string message_;
};

// A value or a Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  T& value() { return *value_; }
  T take() { return std::move(*value_); }
  const Status& status() const { return status_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace fpfs
