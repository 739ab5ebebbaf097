package memory

import (
	"testing"

	"github.com/outrelay/outrelay/internal/setaside/setasidetest"
)

func TestSetAsideContract(t *testing.T) {
	t.Parallel()
	setasidetest.Run(t, func(*testing.T) setasidetest.Setup {
		db := NewDB()
		return setasidetest.Setup{Store: newSetAsideStore(db), Transaction: db.Transaction}
	})
}
