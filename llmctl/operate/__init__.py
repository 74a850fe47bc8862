"""Operations on existing runs and on clusters: cancel, resume, attach, follow, survey."""
