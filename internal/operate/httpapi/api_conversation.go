package httpapi

import (
	"context"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func (a *api) addConversation() {
	addQuery(a, "/lookup/conversation", "show-conversation", "Show the events that follow from one event, as a tree",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			admin.ConversationQuery
		},
		) (admin.Conversation, error) {
			return op.Conversation(ctx, input.ConversationQuery)
		})
}
