package lease

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// moveExpiry sets the expiry of a lease an hour ahead, as a primary does whose clock is wrong.
func moveExpiry(t *testing.T, coll *mongo.Collection) {
	t.Helper()
	_, err := coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: slotID}},
		bson.D{{Key: "$set", Value: bson.D{{Key: "expiresAt", Value: time.Now().Add(time.Hour)}}}})
	if err != nil {
		t.Fatal(err)
	}
}

// The expiry is a time of a server. If its clock was wrong, a dead owner would keep the lease for hours.
func TestN01_ASilentOwnerLosesItsLeaseWhateverItsExpirySays(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	cfg := shortConfig(coll, "a")
	cfg.TTL = time.Second
	zombie := mustAcquire(t, newLease(t, cfg))
	moveExpiry(t, coll)

	cfg.Node = "b"
	began := time.Now()
	next := mustAcquire(t, newLease(t, cfg))
	if took := time.Since(began); took < silentTTLs*cfg.TTL {
		t.Errorf("taken over after %v, want at least %v", took, silentTTLs*cfg.TTL)
	}
	if d := next.Document(); d.Epoch != 2 || d.Node != "b" || d.ExpiresAt.After(time.Now().Add(time.Minute)) {
		t.Errorf("the document of the next owner: %+v", d)
	}

	// The earlier owner wakes up.
	if err := zombie.Save(t.Context(), Update{Checkpoint: Checkpoint{Position: newPosition(9)}}); !errors.Is(err, ErrLeaseLost) {
		t.Errorf("the earlier owner could write: %v", err)
	}
	if d := readStored(t, coll); d.Epoch != 2 || !d.Position().IsZero() {
		t.Errorf("the stored document: %+v", d)
	}
}

func TestN01_AnOwnerThatRenewsIsNotSilent(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	cfg := shortConfig(coll, "a")
	cfg.TTL = time.Second
	long := cfg
	long.TTL, long.Renew = 8*time.Second, 4*time.Second
	// The owner has a longer ttl, and renews seldom by the measure of the standby.
	startRun(t, mustAcquire(t, newLease(t, long)))

	cfg.Node = "b"
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
	defer cancel()
	if h, err := newLease(t, cfg).Acquire(ctx); err == nil {
		t.Errorf("a standby has taken over from a live owner: epoch %d", h.Document().Epoch)
	}
}
