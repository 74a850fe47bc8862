"""Training straight from raw text, which is encoded while the model trains.

pieces  which text is read when: shuffled for every epoch by arithmetic on file sizes
work    what a process does with a piece: read, keep the documents of a split, encode
workers the processes
samples documents shuffled within blocks, cut into samples; where a block begins is all that a resume needs
text_marks  whether text is what it was when a checkpoint was written
seen_text  what was read of it, known again when it is read again
silence  whether a process that encodes still lives
stream  the splits of a run, from its config
"""
