// Package resume holds the vocabulary of positions in a MongoDB change stream: the resume token, the position that a
// token and its cluster time mark, the checkpoint that is kept of it, where checkpoints are stored, and what to do when
// the history behind a checkpoint is gone.
//
// It is a leaf: it opens no stream and starts no goroutine. Comparing and decoding a token costs one pass over its few
// dozen bytes and does no I/O; only a Store of MongoDB talks to a server, one command for each call.
//
// A position means "everything up to here". Positions of one deployment are totally ordered and a Store never lets a
// checkpoint go back. What is not promised: a token's order says nothing across two deployments, and a token that looks
// healthy may still be refused by the server, which alone knows whether its history is there.
package resume
