"""Requests to schedulers under test."""

from llmctl.backends.base import JobRequest
from llmctl.site.profile import ClusterProfile


def request_for(profile: ClusterProfile, **asked: object) -> JobRequest:
    """A request with the profile's entry for the kind of node, and the site's directives."""
    resource = profile.resource_types.get(str(asked.get("resource_type")))
    options = (*profile.options, *(resource.options if resource is not None else ()))
    return JobRequest(profile, resource=resource, site_options=options, **asked)  # type: ignore[arg-type]
