//! What can go wrong: every error names the argument, what it was and what is allowed.

/// An error of any operation. Nothing has been written and nothing launched when an argument is refused.
///
/// ```
/// let error = ferromla::KvFormat::parse("int3").unwrap_err();
/// assert_eq!(error.argument(), Some("kv_format"));
/// assert!(error.to_string().contains("int3"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape, type, device, stride, alignment or value that no version of this operation accepts.
    #[error("{argument} is {value}: {rule}")]
    InvalidArgument {
        /// The argument at fault.
        argument: &'static str,
        /// What it was.
        value: String,
        /// What is allowed.
        rule: String,
    },
    /// A combination that is valid in itself and that this build or device does not offer.
    #[error("{argument} is {value}, which is not supported: {rule}")]
    Unsupported {
        /// The argument at fault.
        argument: &'static str,
        /// What it was.
        value: String,
        /// What is supported.
        rule: String,
    },
    /// A call of the CUDA driver failed, or there is no driver or no device.
    #[error("{call} failed ({code}): {message}")]
    Cuda {
        /// The driver call.
        call: &'static str,
        /// Its `CUresult`; -1 when the driver itself could not be loaded.
        code: i32,
        /// The driver's text for the code.
        message: String,
    },
}

impl Error {
    /// An [`Error::InvalidArgument`].
    pub fn invalid(argument: &'static str, value: impl ToString, rule: impl ToString) -> Self {
        Self::InvalidArgument {
            argument,
            value: value.to_string(),
            rule: rule.to_string(),
        }
    }

    /// An [`Error::Unsupported`].
    pub fn unsupported(argument: &'static str, value: impl ToString, rule: impl ToString) -> Self {
        Self::Unsupported {
            argument,
            value: value.to_string(),
            rule: rule.to_string(),
        }
    }

    /// The argument at fault; `None` for a driver error.
    pub fn argument(&self) -> Option<&'static str> {
        match self {
            Self::InvalidArgument { argument, .. } | Self::Unsupported { argument, .. } => {
                Some(argument)
            }
            Self::Cuda { .. } => None,
        }
    }
}

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
