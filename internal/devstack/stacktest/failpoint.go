package stacktest

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/gofrs/flock"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack"
)

// failPointWait is how long a test waits for others that use the fail point.
const failPointWait = 3 * time.Minute

// FailCommand sets the server's fail point failCommand for the clients called app alone, until off or the end of the test.
// mode is "alwaysOn" or {times: n}. A server has one such fail point, and a second setting replaces the first whatever its
// appName: whoever uses it holds a lock of the whole machine.
func FailCommand(tb testing.TB, app string, mode any, data bson.D) (off func()) {
	tb.Helper()
	lock := flock.New(filepath.Join(devstack.CacheDir(), "failcommand.lock"))
	ctx, cancel := context.WithTimeout(tb.Context(), failPointWait)
	defer cancel()
	if _, err := lock.TryLockContext(ctx, 10*time.Millisecond); err != nil {
		tb.Fatalf("waiting for the fail point: %v", err)
	}
	admin := Client(tb).Database("admin")
	set := func(mode any, data bson.D) {
		cmd := bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: mode}}
		if data != nil {
			cmd = append(cmd, bson.E{Key: "data", Value: append(bson.D{{Key: "appName", Value: app}}, data...)})
		}
		if err := admin.RunCommand(context.WithoutCancel(tb.Context()), cmd).Err(); err != nil {
			tb.Error(err)
		}
	}
	set(mode, data)
	off = sync.OnceFunc(func() {
		set("off", nil)
		if err := lock.Unlock(); err != nil {
			tb.Error(err)
		}
	})
	tb.Cleanup(off)
	return off
}
