package memory

import (
	"context"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/setasidetest"
)

func TestSetAsideContract(t *testing.T) {
	t.Parallel()
	setasidetest.Run(t, func(*testing.T) setasidetest.Setup {
		db := NewDB()
		count := func(ctx context.Context, handler string) (int, error) { return CountSetAside(ctx, db, handler) }
		return setasidetest.Setup{Store: newSetAsideStore(db), Count: count, Transaction: db.Transaction}
	})
}
