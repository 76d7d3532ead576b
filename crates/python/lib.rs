//! placeholder, replaced by its first real commit
