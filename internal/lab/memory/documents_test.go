package memory

import (
	"testing"

	"github.com/outrelay/outrelay/internal/lab/entitytest"
)

func TestEntityContract(t *testing.T) {
	t.Parallel()
	entitytest.Run(t, func(*testing.T) entitytest.Fixture {
		db := NewDB()
		view := NewView(db, "view")
		return entitytest.Fixture{
			Docs: NewDocuments(db, "docs", false), Gone: NewDocuments(db, "gone", false), Plain: NewDocuments(db, "docs", true),
			View: view, Viewed: view.All,
		}
	})
}
