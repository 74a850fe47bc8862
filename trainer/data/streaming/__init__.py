"""Training straight from raw text, which is encoded while the model trains.

pieces  which text is read when: shuffled for every epoch by arithmetic on file sizes
work    what a process does with a piece: read, keep the documents of a split, encode
workers the processes
samples documents shuffled within blocks, cut into samples; where a block begins is all that a resume needs
silence  whether a process that encodes still lives
stream  the splits of a run, from its config
"""
