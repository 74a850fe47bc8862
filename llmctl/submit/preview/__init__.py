"""A submission for people: model, layout, data, start, time, memory and cost, before anything is queued."""
