//! Where the parts of a token lie among the bytes of its page.

/// What a code is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codes {
    /// One byte each: `float8_e4m3fn`, up to 448, without infinities.
    E4m3,
    /// Half a byte each, the element of even number in the low half: `float4_e2m1fn`, up to 6.
    E2m1,
}

/// What a scale is, and how many columns share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// One number for the whole tensor, which is not in it.
    Tensor,
    /// Any float32.
    F32 {
        /// Columns.
        group: usize,
    },
    /// An exponent byte: `2^(byte - 127)`.
    Ue8m0 {
        /// Columns.
        group: usize,
    },
    /// `float8_e4m3fn`.
    E4m3 {
        /// Columns.
        group: usize,
    },
}

/// A quantised format: what a token's bytes are.
///
/// A row is its first `coded` numbers as codes, the scales of their groups, and its other numbers in
/// bfloat16. In a split page the scales of all tokens come after their rows instead.
///
/// ```
/// use ferromla_format::{FP8_V32, FP8_V4};
/// assert_eq!((FP8_V32.bytes(), FP8_V4.bytes()), (656, 584));
/// // The second token of a page of 64: after 512 codes its 4 scales, then the rotary part.
/// let place = FP8_V32.place(1, 64, 656);
/// assert_eq!((place.codes, place.scales, place.rope), (656, 656 + 512, 656 + 528));
/// let place = FP8_V4.place(1, 64, 584);
/// assert_eq!((place.codes, place.rope, place.scales), (576, 576 + 448, 64 * 576 + 8));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Numbers of a row, `d_qk`.
    pub width: usize,
    /// How many of them, from the first on, are codes.
    pub coded: usize,
    /// Of what kind.
    pub codes: Codes,
    /// What they are multiplied by.
    pub scales: Scales,
    /// Whether the scales of a page come after all its rows.
    pub split: bool,
}

/// `"fp8"` of 576 numbers.
pub const FP8_576: Layout = Layout {
    width: 576,
    coded: 576,
    codes: Codes::E4m3,
    scales: Scales::Tensor,
    split: false,
};
/// `"fp8"` of 512 numbers.
pub const FP8_512: Layout = Layout {
    width: 512,
    coded: 512,
    ..FP8_576
};
/// `"fp8_v32"`: DeepSeek V3.2.
pub const FP8_V32: Layout = Layout {
    width: 576,
    coded: 512,
    codes: Codes::E4m3,
    scales: Scales::F32 { group: 128 },
    split: false,
};
/// `"fp8_v4"`: DeepSeek V4.
pub const FP8_V4: Layout = Layout {
    width: 512,
    coded: 448,
    codes: Codes::E4m3,
    scales: Scales::Ue8m0 { group: 64 },
    split: true,
};
/// `"fp8_v41"`: DeepSeek V4.1, scales beside the codes.
pub const FP8_V41: Layout = Layout {
    width: 512,
    coded: 512,
    codes: Codes::E4m3,
    scales: Scales::Ue8m0 { group: 32 },
    split: false,
};
/// `"fp8_v41_split"`: DeepSeek V4.1, scales after the rows.
pub const FP8_V41_SPLIT: Layout = Layout {
    split: true,
    ..FP8_V41
};
/// `"fp4_v41"`: the extra cache of DeepSeek V4.1.
pub const FP4_V41: Layout = Layout {
    width: 512,
    coded: 512,
    codes: Codes::E2m1,
    scales: Scales::E4m3 { group: 16 },
    split: false,
};

/// All of them.
pub const LAYOUTS: [Layout; 7] = [
    FP8_576,
    FP8_512,
    FP8_V32,
    FP8_V4,
    FP8_V41,
    FP8_V41_SPLIT,
    FP4_V41,
];

/// The most numbers of a row.
pub const MAX_WIDTH: usize = 576;

/// Where the parts of one token begin, in bytes from the beginning of its page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Of [`Layout::code_bytes`].
    pub codes: usize,
    /// Of [`Layout::scale_bytes`].
    pub scales: usize,
    /// Of [`Layout::rope_bytes`].
    pub rope: usize,
}

impl Layout {
    /// Bytes of a token's codes.
    pub const fn code_bytes(&self) -> usize {
        match self.codes {
            Codes::E4m3 => self.coded,
            Codes::E2m1 => self.coded / 2,
        }
    }

    /// Columns that share a scale.
    pub const fn group(&self) -> usize {
        match self.scales {
            Scales::Tensor => self.coded,
            Scales::F32 { group } | Scales::Ue8m0 { group } | Scales::E4m3 { group } => group,
        }
    }

    /// Bytes of a token's scales, padding to a multiple of 8 included.
    pub const fn scale_bytes(&self) -> usize {
        let size = match self.scales {
            Scales::Tensor => 0,
            Scales::F32 { .. } => 4,
            Scales::Ue8m0 { .. } | Scales::E4m3 { .. } => 1,
        };
        (size * (self.coded / self.group())).next_multiple_of(8)
    }

    /// Bytes of the numbers that are no codes.
    pub const fn rope_bytes(&self) -> usize {
        2 * (self.width - self.coded)
    }

    /// Bytes from one token's row to the next where rows are dense.
    pub const fn row_bytes(&self) -> usize {
        let scales = if self.split { 0 } else { self.scale_bytes() };
        self.code_bytes() + scales + self.rope_bytes()
    }

    /// Bytes of a token.
    pub const fn bytes(&self) -> usize {
        self.code_bytes() + self.scale_bytes() + self.rope_bytes()
    }

    /// What the page stride of a newly allocated cache is a multiple of, in bytes.
    pub const fn page_alignment(&self) -> usize {
        if self.split { self.row_bytes() } else { 1 }
    }

    /// Where token `offset` of a page lies. `token_stride` (bytes) counts unless the page is split.
    pub const fn place(&self, offset: usize, page_size: usize, token_stride: usize) -> Place {
        if self.split {
            let codes = offset * self.row_bytes();
            Place {
                codes,
                scales: page_size * self.row_bytes() + offset * self.scale_bytes(),
                rope: codes + self.code_bytes(),
            }
        } else {
            let codes = offset * token_stride;
            let scales = codes + self.code_bytes();
            Place {
                codes,
                scales,
                rope: scales + self.scale_bytes(),
            }
        }
    }
}
