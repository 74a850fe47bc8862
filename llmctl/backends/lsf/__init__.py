"""IBM Spectrum LSF."""
