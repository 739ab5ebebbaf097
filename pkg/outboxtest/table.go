package outboxtest

import "github.com/outrelay/outrelay/internal/lab/memory"

// Table replaces a collection of a service in unit tests. It contains documents of type V with keys of type K. Its
// operations join the transaction of their context. Documents are stored as BSON: values that BSON cannot represent are
// lost here too, and stored documents cannot be changed from outside.
type Table[K comparable, V any] = memory.Table[K, V]

// NewTable returns the table called name. Tables with the same name share their documents and must have the same types. The
// name must not be the name of an outbox, an inbox or a saga.
func NewTable[K comparable, V any](env *Env, name string) *Table[K, V] {
	return memory.NewTable[K, V](env.db, name)
}
