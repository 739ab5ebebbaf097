package admin_test

import (
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Only a process of the watcher sends its waiting events: a removal would lose them.
func TestAWatcherWithUnsentEventsIsNotRemoved(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	if err := f.owner.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	expectUnsent := func() {
		t.Helper()
		for _, dryRun := range []bool{true, false} {
			if _, err := f.op.Watchers().Remove(t.Context(), dryRun); !errors.Is(err, admin.ErrUnsent) {
				t.Errorf("dry run %v: %v, want ErrUnsent", dryRun, err)
			}
		}
		if kind, _ := admin.Explain(admin.ErrUnsent); kind != admin.FailConflict {
			t.Errorf("the failure is %s", kind)
		}
	}

	f.insertWaiting(f.a, "1", "parked", "k1", "orders")
	expectUnsent()
	if _, err := f.state.Collection("waiting").DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}
	claim, err := bson.Marshal(append(letterOf("claimed", planted), bson.E{Key: "dueAt", Value: time.Now()}))
	if err != nil {
		t.Fatal(err)
	}
	claims := f.state.Collection(waiting.ClaimsName)
	if err := waiting.InsertClaim(t.Context(), claims, &waiting.Claim{ID: waiting.NewClaimID("orders/0of1"), Envelopes: []waiting.Claimed{{NS: "a.outbox", Raw: claim}}}); err != nil {
		t.Fatal(err)
	}
	expectUnsent()

	if _, err := claims.DeleteMany(t.Context(), bson.D{}); err != nil {
		t.Fatal(err)
	}
	if out, err := f.op.Watchers().Remove(t.Context(), false); err != nil || out.Registrations != 2 {
		t.Errorf("%+v, %v", out, err)
	}
}
