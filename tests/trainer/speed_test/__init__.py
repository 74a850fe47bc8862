"""Tests of the speed test."""
