//! Arrays in memory with any order of dimensions, padding and direction.

use ferromla_cpu::{Format, Parts, Rows as RowsCpu, Strided};

use super::Rng;

/// Rows of `width` elements over `D` dimensions.
pub struct Rows<T, const D: usize> {
    pub data: Vec<T>,
    pub shape: [usize; D],
    pub strides: [i64; D],
    offset: usize,
    width: usize,
    fill: T,
}

impl<T: Copy + PartialEq, const D: usize> Rows<T, D> {
    /// Dense, or (given `rng`) with shuffled dimensions, gaps, and some of them backwards.
    pub fn new(shape: [usize; D], width: usize, fill: T, rng: Option<&mut Rng>) -> Self {
        let mut order: Vec<usize> = (0..D).rev().collect();
        let mut strides = [0i64; D];
        let (mut extent, mut offset) = (width, 0);
        match rng {
            None => {
                for d in order {
                    strides[d] = extent as i64;
                    extent *= shape[d].max(1);
                }
            }
            Some(rng) => {
                rng.shuffle(&mut order);
                for d in order {
                    extent += rng.below(8);
                    strides[d] = extent as i64;
                    let span = extent * shape[d].max(1);
                    if rng.chance(25) {
                        offset += extent * shape[d].saturating_sub(1);
                        strides[d] = -strides[d];
                    }
                    extent = span;
                }
            }
        }
        Self {
            data: vec![fill; extent],
            shape,
            strides,
            offset,
            width,
            fill,
        }
    }

    pub fn start(&self, index: [usize; D]) -> usize {
        let offset: i64 = index
            .iter()
            .zip(self.strides)
            .map(|(i, s)| *i as i64 * s)
            .sum();
        (self.offset as i64 + offset) as usize
    }

    pub fn row(&self, index: [usize; D]) -> &[T] {
        let start = self.start(index);
        &self.data[start..start + self.width]
    }

    pub fn set_row(&mut self, index: [usize; D], row: &[T]) {
        assert_eq!(row.len(), self.width);
        let start = self.start(index);
        self.data[start..start + self.width].copy_from_slice(row);
    }

    /// A view of the rows from their element `skip` on.
    pub fn view(&self, skip: usize) -> Strided<T, D> {
        Strided::new(
            self.data.as_ptr().wrapping_add(self.offset + skip),
            self.shape,
            self.strides,
        )
    }

    /// The same, for writing.
    pub fn view_mut(&mut self, skip: usize) -> Strided<T, D> {
        let ptr = self.data.as_mut_ptr().wrapping_add(self.offset + skip);
        Strided::new(ptr, self.shape, self.strides)
    }

    /// Everything outside the rows still holds what the array was filled with.
    pub fn assert_gaps_untouched(&self) {
        let mut inside = vec![false; self.data.len()];
        for index in indices(self.shape) {
            let start = self.start(index);
            inside[start..start + self.width].fill(true);
        }
        let untouched = |(x, inside): (&T, &bool)| *inside || *x == self.fill;
        assert!(
            self.data.iter().zip(&inside).all(untouched),
            "wrote between the rows"
        );
    }
}

/// All indices of a shape, last dimension fastest.
pub fn indices<const D: usize>(shape: [usize; D]) -> impl Iterator<Item = [usize; D]> {
    (0..shape.iter().product()).map(move |mut flat| {
        let mut index = [0; D];
        for d in (0..D).rev() {
            index[d] = flat % shape[d];
            flat /= shape[d];
        }
        index
    })
}

/// q or a cache: one array, or a latent and a rope array.
pub enum Held<const D: usize> {
    One(Rows<u16, D>),
    Two(Rows<u16, D>, Rows<u16, D>),
}

impl<const D: usize> Held<D> {
    pub fn new(
        shape: [usize; D],
        width: usize,
        two: bool,
        fill: u16,
        mut rng: Option<&mut Rng>,
    ) -> Self {
        if two && width == 576 {
            Held::Two(
                Rows::new(shape, 512, fill, rng.as_deref_mut()),
                Rows::new(shape, 64, fill, rng),
            )
        } else {
            Held::One(Rows::new(shape, width, fill, rng))
        }
    }

    pub fn set_row(&mut self, index: [usize; D], row: &[u16]) {
        match self {
            Held::One(rows) => rows.set_row(index, row),
            Held::Two(nope, rope) => {
                nope.set_row(index, &row[..512]);
                rope.set_row(index, &row[512..]);
            }
        }
    }

    pub fn get_row(&self, index: [usize; D]) -> Vec<u16> {
        match self {
            Held::One(rows) => rows.row(index).to_vec(),
            Held::Two(nope, rope) => [nope.row(index), rope.row(index)].concat(),
        }
    }

    pub fn rows(&mut self, format: Format) -> RowsCpu<D> {
        match format {
            Format::Bf16 => RowsCpu::Bf16(self.parts()),
            Format::Fp16 => RowsCpu::Fp16(self.parts()),
        }
    }

    fn parts(&mut self) -> Parts<D> {
        match self {
            Held::One(rows) => {
                let rope = (rows.width == 576).then(|| rows.view_mut(512));
                Parts {
                    nope: rows.view_mut(0),
                    rope,
                }
            }
            Held::Two(nope, rope) => Parts {
                nope: nope.view_mut(0),
                rope: Some(rope.view_mut(0)),
            },
        }
    }

    pub fn assert_gaps_untouched(&self) {
        match self {
            Held::One(rows) => rows.assert_gaps_untouched(),
            Held::Two(nope, rope) => {
                nope.assert_gaps_untouched();
                rope.assert_gaps_untouched();
            }
        }
    }
}
