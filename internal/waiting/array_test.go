package waiting

import (
	"fmt"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/outboxes"
)

// A service can store an array as a key. The index has an entry for each of its elements, and the server compares such a document by
// each of them; no exception of another key is left out of a scan for that.
func TestN15_AnArrayAsAKeyCutsNoScanShort(t *testing.T) {
	t.Parallel()
	coll, _ := exceptionOutbox(t)
	keys := []any{"a", "b", bson.A{"a", "z"}, "c", "d", bson.A{}, bson.A{"zz"}, "y", bson.D{{Key: "x", Value: 1}}, bson.A{bson.A{"a"}, 5, nil}, int32(7), nil}
	var docs []any
	for i, key := range keys {
		for j := range 3 {
			docs = append(docs, bson.D{
				{Key: "_id", Value: fmt.Sprint(i, "-", j)},
				{Key: "state", Value: outboxes.Exceptional[(i+j)%3]},
				{Key: "pos", Value: fmt.Sprintf("82%02d", i+j)},
				{Key: "key", Value: key},
			})
		}
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	for _, limit := range []int{1, 2, 3, 5, 100} {
		seen := map[string]int{}
		readAll(t, &ExceptionScan{Coll: coll}, limit, func(raw bson.Raw) { seen[raw.Lookup("_id").StringValue()]++ })
		for _, d := range docs {
			if id := d.(bson.D)[0].Value.(string); seen[id] != 1 {
				t.Errorf("pages of %d: %s of key %v came %d times", limit, id, d.(bson.D)[3].Value, seen[id])
			}
		}
	}
}

// However many exceptions have arrays as keys, a scan names only so many of them to the server, and reads the others' keys.
func TestN15_ManyArraysAsKeysHoldUpNoOtherKey(t *testing.T) {
	t.Parallel()
	coll, _ := exceptionOutbox(t)
	var docs []any
	for i := range mostOdd + 500 {
		docs = append(docs, bson.D{{Key: "_id", Value: i}, {Key: "state", Value: "parked"}, {Key: "pos", Value: "82"}, {Key: "key", Value: bson.A{"a"}}})
	}

	for _, key := range []string{"a", "b"} {
		docs = append(docs, bson.D{{Key: "_id", Value: key}, {Key: "state", Value: "parked"}, {Key: "pos", Value: "82"}, {Key: "key", Value: key}})
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	scan, arrays, others := &ExceptionScan{Coll: coll}, 0, 0
	readAll(t, scan, 250, func(raw bson.Raw) {
		if raw.Lookup("key").Type == bson.TypeArray {
			arrays++
		} else {
			others++
		}
	})

	if others != 2 || arrays < mostOdd || len(scan.odd) > mostOdd+250 {
		t.Errorf("%d of 2 other keys, %d arrays, %d named", others, arrays, len(scan.odd))
	}
}
