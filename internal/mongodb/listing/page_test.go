package listing

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// A cursor names its order, so a list rejects the cursor of another list before it reads anything.
func TestACursorBelongsToItsList(t *testing.T) {
	t.Parallel()
	byDeath, byChange := Order{Field: "movedAt", Down: true}, Order{Field: "updatedAt", Down: true}
	after, err := byDeath.Cursor(bson.DateTime(5), "a")
	if err != nil {
		t.Fatal(err)
	}
	if filter, err := byDeath.Continue(bson.D{}, after); err != nil || len(filter) == 0 {
		t.Errorf("its own cursor: %v, %v", filter, err)
	}

	incomplete, err := EncodeCursor(bson.D{{Key: "f", Value: "updatedAt"}, {Key: "v", Value: 5}})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"of another list": after, "no cursor": "x", "without an id": incomplete} {
		if _, err := byChange.Continue(bson.D{}, text); !errors.Is(err, ErrCursor) {
			t.Errorf("%s: got %v, want %v", name, err, ErrCursor)
		}
	}
}

// Every entry is on one page, in the order of the list, also if many entries have one value and ids of different types, and if entries
// are removed while the pages are read.
func TestPagesHaveEachEntryOnce(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("c")
	const entries = 60
	docs := make([]any, entries)
	for i := range docs {
		ids := []any{i, strconv.Itoa(i), bson.NewObjectID()}
		docs[i] = bson.D{{Key: "_id", Value: ids[i%3]}, {Key: "n", Value: i}, {Key: "at", Value: i / 25}}
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	orders := []Order{{Field: "at"}, {Field: "at", Down: true}, {Field: "at", IDsUpward: true, Down: true}, {Field: "at", FieldIndex: true}, {Field: "at", FieldIndex: true, Down: true}}
	for _, order := range orders {
		want, err := mongodb.FindAll[struct{ N int }](t.Context(), coll, "reading", bson.D{}, options.Find().SetSort(order.Sort()))
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{1, 7, entries - 1, entries, entries + 1} {
			got, pages := readPages(t, coll, order, size)
			if !slices.Equal(got, want) || pages != (entries-1)/size+1 {
				t.Errorf("%+v, pages of %d: %d entries on %d pages, or another order", order, size, len(got), pages)
			}
		}
	}
}

// readPages reads all pages of a list, and returns their entries and their number.
func readPages(t *testing.T, coll *mongo.Collection, order Order, size int) (all []struct{ N int }, pages int) {
	t.Helper()
	for after, first := "", true; first || after != ""; first = false {
		page, next, err := ReadPage[struct{ N int }](t.Context(), coll, order, bson.D{}, after, size, options.Find())
		if err != nil {
			t.Fatal(err)
		}
		all, after = append(all, page...), next
		pages++
	}
	return all, pages
}

// If entries are removed between the two queries of a page, the list goes on.
func TestAPageWhoseEntriesAreRemovedIsNotTheLast(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	for _, down := range []bool{false, true} {
		coll := db.Collection(fmt.Sprint("down-", down))
		if _, err := coll.InsertMany(t.Context(), []any{bson.D{{Key: "at", Value: 1}}, bson.D{{Key: "at", Value: 2}}, bson.D{{Key: "at", Value: 3}}}); err != nil {
			t.Fatal(err)
		}
		order := Order{Field: "at", FieldIndex: true, Down: down}
		bound, err := order.findBound(t.Context(), coll, bson.D{}, 1)
		if err != nil || bound.AsInt64() != 2 {
			t.Fatalf("the bound is %s (%v), want 2", bound, err)
		}

		after, err := order.Cursor(bound, order.lastID())
		if err != nil {
			t.Fatal(err)
		}
		page, next, err := ReadPage[struct{ At int }](t.Context(), coll, order, bson.D{}, after, 5, options.Find())
		if want := map[bool]int{false: 3, true: 1}[down]; err != nil || next != "" || len(page) != 1 || page[0].At != want {
			t.Errorf("down %v: got %v (%v), want %d", down, page, err, want)
		}
	}
}

func TestAnEmptyListIsACondition(t *testing.T) {
	t.Parallel()
	var filter Filter
	if In(&filter, "id", []string(nil)); len(filter) != 0 {
		t.Errorf("without a list: got %v, want no condition", filter)
	}
	if In(&filter, "id", []string{}); len(filter) != 1 {
		t.Errorf("with an empty list: got %v, want a condition", filter)
	}
}
