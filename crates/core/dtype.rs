//! Element types, devices and cache formats.

use std::fmt;

use ferromla_format::{self as format, Layout};

use crate::error::{Error, Result};

/// The element type of a [`View`](crate::View). More types can be named than any operation takes, so that
/// an error can say what was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // the names say it
pub enum DType {
    Bf16,
    Fp16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    F4E2M1,
    /// Anything else (complex numbers, vectors of several lanes); refused everywhere.
    Other,
}

impl DType {
    /// Bytes of one element, rounded up to one; 0 for [`DType::Other`].
    ///
    /// ```
    /// assert_eq!(ferromla::DType::Bf16.size(), 2);
    /// ```
    pub const fn size(self) -> u64 {
        match self {
            Self::Other => 0,
            Self::I8
            | Self::U8
            | Self::Bool
            | Self::F8E4M3
            | Self::F8E5M2
            | Self::F8E8M0
            | Self::F4E2M1 => 1,
            Self::Bf16 | Self::Fp16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The name numpy and torch users know, `"bfloat16"` for instance.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::Fp16 => "float16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
            Self::Bool => "bool",
            Self::F8E4M3 => "float8_e4m3fn",
            Self::F8E5M2 => "float8_e5m2",
            Self::F8E8M0 => "float8_e8m0fnu",
            Self::F4E2M1 => "float4_e2m1fn_x2",
            Self::Other => "of a type without a name here",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where memory lives and where the work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// Host memory; the CPU backend.
    Cpu,
    /// The CUDA device of this ordinal.
    Cuda(u32),
}

impl Device {
    /// Whether this is a CUDA device.
    pub const fn is_cuda(self) -> bool {
        matches!(self, Self::Cuda(_))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The byte layout of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are those of `name`
pub enum KvFormat {
    Bf16,
    Fp16,
    Fp8,
    Fp8V32,
    Fp8V4,
    Fp8V41,
    Fp8V41Split,
    Fp4V41,
}

/// As what rows of caches are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operands {
    /// The 16-bit numbers that they are.
    Halves,
    /// e4m3 codes, as they lie in the cache, with their scales.
    Codes,
    /// Those of caches without scales.
    BareCodes,
    /// e4m3 codes, some of which e2m1 codes have become: sixteen columns have a scale.
    FineCodes,
    /// Halves that any of them are converted to as they come.
    Converted,
}

impl KvFormat {
    /// Every format that has a name.
    pub const ALL: [Self; 8] = [
        Self::Bf16,
        Self::Fp16,
        Self::Fp8,
        Self::Fp8V32,
        Self::Fp8V4,
        Self::Fp8V41,
        Self::Fp8V41Split,
        Self::Fp4V41,
    ];

    /// The formats that [`decode`](crate::decode) and [`prefill`](crate::prefill) take.
    pub const DENSE: [Self; 4] = [Self::Bf16, Self::Fp16, Self::Fp8, Self::Fp8V32];

    /// The formats of the caches of [`sparse_decode`](crate::sparse_decode) and
    /// [`sparse_prefill`](crate::sparse_prefill); the extra cache may be of any format.
    pub const SPARSE: [Self; 7] = [
        Self::Bf16,
        Self::Fp16,
        Self::Fp8,
        Self::Fp8V32,
        Self::Fp8V4,
        Self::Fp8V41,
        Self::Fp8V41Split,
    ];

    /// The format's name, as [`KvFormat::parse`] reads it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
            Self::Fp8V32 => "fp8_v32",
            Self::Fp8V4 => "fp8_v4",
            Self::Fp8V41 => "fp8_v41",
            Self::Fp8V41Split => "fp8_v41_split",
            Self::Fp4V41 => "fp4_v41",
        }
    }

    /// The format of this name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `kv_format` for a name that is none.
    ///
    /// ```
    /// use ferromla::KvFormat;
    /// assert_eq!(KvFormat::parse("bf16"), Ok(KvFormat::Bf16));
    /// ```
    pub fn parse(name: &str) -> Result<Self> {
        Self::parse_as("kv_format", name)
    }

    /// The format of this name, which was given as this argument.
    ///
    /// # Errors
    /// As [`KvFormat::parse`], naming `argument`.
    ///
    /// ```
    /// use ferromla::KvFormat;
    /// let error = KvFormat::parse_as("extra_kv_format", "int4").unwrap_err();
    /// assert!(error.to_string().starts_with("extra_kv_format"));
    /// ```
    pub fn parse_as(argument: &'static str, name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| {
                let names: Vec<_> = Self::ALL.iter().map(|format| format.name()).collect();
                Error::invalid(
                    argument,
                    format!("{name:?}"),
                    format!("one of {}", names.join(", ")),
                )
            })
    }

    /// The element type of an unquantised cache of this format; `None` for the quantised formats.
    pub const fn dtype(self) -> Option<DType> {
        match self {
            Self::Bf16 => Some(DType::Bf16),
            Self::Fp16 => Some(DType::Fp16),
            _ => None,
        }
    }

    /// Whether its caches hold codes: those of a quantised format are one tensor of bytes.
    pub(crate) const fn is_quantised(self) -> bool {
        self.dtype().is_none()
    }

    /// Of caches whose keys join the same softmax.
    pub(crate) fn operands(formats: &[Self]) -> Operands {
        let all = |is: fn(&Self) -> bool| formats.iter().all(is);
        if all(|format| !format.is_quantised()) {
            Operands::Halves
        } else if all(|format| *format == Self::Fp8) {
            Operands::BareCodes
        } else if all(|format| format.is_quantised() && *format != Self::Fp4V41) {
            Operands::Codes
        } else if all(|format| Self::BESIDE_FP4.contains(format)) {
            Operands::FineCodes
        } else {
            Operands::Converted
        }
    }

    /// Rows of 512 columns that lie as long as those of `fp4_v41` when these have become e4m3 codes.
    const BESIDE_FP4: [Self; 4] = [Self::Fp8, Self::Fp8V41, Self::Fp8V41Split, Self::Fp4V41];

    /// The row widths that a cache of this format can have.
    ///
    /// ```
    /// use ferromla::KvFormat;
    /// assert_eq!(KvFormat::Fp8.d_qk(), &[576, 512]);
    /// assert_eq!(KvFormat::Fp8V4.d_qk(), &[512]);
    /// ```
    pub const fn d_qk(self) -> &'static [i64] {
        match self {
            Self::Bf16 | Self::Fp16 | Self::Fp8 => &[576, 512],
            Self::Fp8V32 => &[576],
            Self::Fp8V4 | Self::Fp8V41 | Self::Fp8V41Split | Self::Fp4V41 => &[512],
        }
    }

    /// The quantised layouts of this format, one for each of its widths; none where it is not quantised.
    pub(crate) const fn layouts(self) -> &'static [Layout] {
        match self {
            Self::Bf16 | Self::Fp16 => &[],
            Self::Fp8 => &[format::FP8_576, format::FP8_512],
            Self::Fp8V32 => &[format::FP8_V32],
            Self::Fp8V4 => &[format::FP8_V4],
            Self::Fp8V41 => &[format::FP8_V41],
            Self::Fp8V41Split => &[format::FP8_V41_SPLIT],
            Self::Fp4V41 => &[format::FP4_V41],
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
