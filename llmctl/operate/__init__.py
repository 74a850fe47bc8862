"""Operations on runs that exist, and on clusters: cancel, resume, attach, follow, survey."""
