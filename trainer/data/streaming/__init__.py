"""Training straight from raw text, which is encoded while the model trains.

text_pieces  order of the text: pieces of files, shuffled for every epoch by arithmetic on file sizes
work         work of a process on a piece: read, keep the documents of a split, encode
workers      the processes that encode, and the thread that drives them
samples      documents shuffled within blocks, cut into samples; a resume needs only the start of a block
stream       the splits of a run, from its config
"""
