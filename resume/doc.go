// Package resume defines positions in a MongoDB change stream: the resume token, the position that
// consists of a token and its cluster time, the checkpoint that stores a position, and the stores for
// checkpoints.
//
// The package opens no stream and starts no goroutine. To compare or decode a token takes one pass
// over its few dozen bytes. Only the Store of NewMongo does I/O, with one or two commands for each
// call.
//
// Order: a position means that everything up to it is done. Positions of one deployment are totally
// ordered, and a Store never lets a checkpoint go back. Tokens of different deployments cannot be
// compared. The server may reject a token that looks valid, because only the server can check
// whether it still has the history.
package resume
