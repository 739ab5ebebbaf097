// Package usage records what the collections of this process are used for, so that sagas and entities cannot overwrite each
// other's documents. It does no I/O and does not block.
package usage

import (
	"fmt"
	"sync"
	"weak"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// collection identifies a collection. A client that is gone has no collections any more.
type collection struct {
	client   weak.Pointer[mongo.Client]
	db, name string
}

// uses contains a string for each collection.
var uses sync.Map

// Claim records that coll contains documents of this use, such as "sagas". It returns an error if another part of the process has
// claimed coll for another use. It is safe for concurrent use.
func Claim(coll *mongo.Collection, use string) error {
	key := collection{weak.Make(coll.Database().Client()), coll.Database().Name(), coll.Name()}
	have, loaded := uses.LoadOrStore(key, use)
	if loaded && have != use {
		return fmt.Errorf("collection %s.%s contains %s in this process, so it cannot contain %s: use another collection",
			key.db, key.name, have, use)
	}
	return nil
}
