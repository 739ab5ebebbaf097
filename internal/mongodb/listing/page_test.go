package listing

import (
	"errors"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
)

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

	incomplete, err := mongodb.EncodeCursor(bson.D{{Key: "f", Value: "updatedAt"}, {Key: "v", Value: 5}})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"of another list": after, "no cursor": "x", "without an id": incomplete} {
		if _, err := byChange.Continue(bson.D{}, text); !errors.Is(err, mongodb.ErrCursor) {
			t.Errorf("%s: got %v, want %v", name, err, mongodb.ErrCursor)
		}
	}
}
