package opspage

import (
	"context"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// unreadGroups has a group that only MongoDB has data of.
type unreadGroups struct{}

func (g unreadGroups) List(ctx context.Context, _ bool) (admin.GroupList, error) {
	group, err := g.Show(ctx, "office")
	return admin.GroupList{Groups: []admin.Group{group}}, err
}

func (unreadGroups) Show(context.Context, string) (admin.Group, error) {
	return admin.Group{Group: "office", Problem: "Kafka has no coordinator"}, nil
}

func TestAGroupThatCannotBeReadHasNoFigures(t *testing.T) {
	t.Parallel()
	desk := &desk{text: "x"}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		use := desk.useCases()
		use.Groups = unreadGroups{}
		return use
	}})

	for at, unwanted := range map[string]string{"/groups": `class="num" data-label="Lag">0`, "/groups?group=office": "lag 0"} {
		_, body := sendRequest(t, site, &operator, "GET", at, nil)
		if !strings.Contains(body, "Kafka has no coordinator") || !strings.Contains(body, "unknown") || strings.Contains(body, unwanted) ||
			strings.Contains(body, `data-label="Members">0`) {
			t.Errorf("%s:\n%s", at, body)
		}
	}
}
