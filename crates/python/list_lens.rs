//! Lengths of lists of keys, as calls and plans are given them.

use ferromla::{Device, PlanArgs, View};
use pyo3::prelude::*;

use crate::arguments;
use crate::errors;
use crate::framework;
use crate::tensor::{self, Tensor};

/// Of the lists of a cache and of an extra one, where they are given.
pub struct ListLens<'py> {
    main: Option<Tensor<'py>>,
    extra: Option<Tensor<'py>>,
}

impl<'py> ListLens<'py> {
    pub fn read(
        main: Option<&Bound<'py, PyAny>>,
        extra: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        Ok(Self {
            main: tensor::read_optional(main, "topk_lengths")?,
            extra: tensor::read_optional(extra, "extra_topk_lengths")?,
        })
    }

    pub fn first(&self) -> Option<&Tensor<'py>> {
        self.main.as_ref().or(self.extra.as_ref())
    }

    pub fn views(&self) -> [Option<&View>; 2] {
        [&self.main, &self.extra].map(|lens| lens.as_ref().map(|lens| &lens.view))
    }

    /// Their first dimension: requests, or tokens where these have none.
    pub fn count(&self) -> Option<i64> {
        self.first()
            .and_then(|lens| lens.view.shape().first().copied())
    }

    /// The device that is given, else theirs.
    pub fn device(&self, given: Option<&Bound<'py, PyAny>>) -> PyResult<Device> {
        match given {
            Some(given) => arguments::device(given),
            None => Ok(self.first().map_or(Device::Cpu, |lens| lens.view.device())),
        }
    }

    /// A plan for them, and the tensor that it lives in: `workspace` or a new one.
    pub fn plan(
        &self,
        py: Python<'py>,
        args: &PlanArgs,
        workspace: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(ferromla::Plan, Tensor<'py>)> {
        let workspace = match (workspace, self.first()) {
            (Some(given), _) => tensor::read_output(given, "workspace")?,
            (None, near) => {
                let count = ferromla::workspace_bytes(args).map_err(errors::to_python)?;
                match near {
                    Some(near) => framework::bytes(near, args.device, count)?,
                    None => framework::bytes_anywhere(py, args.device, count)?,
                }
            }
        };
        let near = self.first().unwrap_or(&workspace);
        let stream = framework::stream_on(near, &workspace, args.device)?;
        let [main, extra] = self.views();
        // SAFETY: the lengths and the workspace are borrowed from live tensors, whose owner keeps the plan beside the workspace.
        let plan = unsafe { ferromla::Plan::new_sparse(args, main, extra, workspace.view, stream) };
        Ok((plan.map_err(errors::to_python)?, workspace))
    }
}
