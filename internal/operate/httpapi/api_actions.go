package httpapi

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/tasks"
)

// asyncWait is how long a request with Prefer: respond-async waits for its action. So the error of a request that cannot be carried out is
// its response.
const asyncWait = 2 * time.Second

// actionsPath is the path of the actions that go on after their request.
const actionsPath = "/actions/"

// Action is a long action, which goes on when its request has ended.
type Action struct {
	ID        string     `json:"id"`
	Operation string     `json:"operation" doc:"The operationId of the request that has started it."`
	StartedAt time.Time  `json:"started_at"`
	Running   bool       `json:"running"`
	Done      int64      `json:"done" doc:"Processed entries."`
	Total     int64      `json:"total,omitempty" doc:"Entries that the action will process; missing if the number is unknown."`
	Result    any        `json:"result,omitempty" doc:"The body with which the request would have responded; missing while the action runs."`
	Problem   *ErrorBody `json:"problem,omitempty" doc:"Why the action ended early. The processed part remains, and the same request does the rest."`
}

// newAction returns the state of a task that the runner keeps with this id.
func newAction(id string, task *tasks.Task) Action {
	action := Action{
		ID: id, Operation: task.Name, StartedAt: task.Began.UTC(), Running: !task.HasEnded(), Done: task.Done(), Total: task.Total(),
	}
	if action.Running {
		return action
	}

	result, err := task.Result()
	if err != nil {
		action.Problem, _ = errors.AsType[*ErrorBody](problemOf(err))
	} else {
		action.Result = result
	}
	return action
}

// longResponse is the response to a long action: its result, or its state with the status 202.
type longResponse struct {
	Status   int
	Location string `header:"Location" doc:"Of an action that goes on: the address of its progress."`
	Body     any
}

// patienceKey is the key of the time that a request waits for its action.
type patienceKey struct{}

// readPreference stores how long the request waits for its action: as it prefers, or as long as for any action.
func readPreference(ctx huma.Context, next func(huma.Context)) {
	patience := actionTime
	for preference := range strings.SplitSeq(ctx.Header("Prefer"), ",") {
		if strings.EqualFold(strings.TrimSpace(preference), "respond-async") {
			patience = asyncWait
		}
	}
	next(huma.WithValue(ctx, patienceKey{}, patience))
}

// addLongAction registers an action that may process a million entries. It goes on when its request has ended. If it has not ended in time, the
// response has the status 202 and the state of the action. run reports its progress to the task.
func addLongAction[I scoped, O any](
	api *api, path, id, summary string, run func(context.Context, admin.Operator, *I, *tasks.Task) (O, error),
) {
	responses := responseWith(bodyOf[O](api))
	responses[strconv.Itoa(http.StatusAccepted)] = &huma.Response{
		Description: "The action goes on. Location is the address of its progress.",
		Content:     map[string]*huma.MediaType{"application/json": {Schema: bodyOf[Action](api)}},
	}

	addOperation(api, huma.Operation{
		Method:        http.MethodPost,
		Path:          path,
		OperationID:   id,
		Summary:       summary,
		DefaultStatus: http.StatusOK,
		Responses:     responses,
		MaxBodyBytes:  smallBody,
		Extensions:    map[string]any{roleExtension: admin.RoleOperator},
		Middlewares:   huma.Middlewares{readPreference},
		Parameters: []*huma.Param{{
			Name: "Prefer", In: "header", Schema: &huma.Schema{Type: huma.TypeString},
			Description: "respond-async: respond after 2 seconds, if the action takes longer. Default: wait for up to 5 minutes.",
		}},
	}, actionTime+asyncWait, func(ctx context.Context, op admin.Operator, input *I) (*longResponse, error) {
		caller, _ := admin.CallerOf(ctx)
		task := api.tasks.Start(ctx, tasks.Order{Name: id, Actor: caller.Actor.Name}, func(ctx context.Context, task *tasks.Task) (any, error) {
			return run(ctx, op, input, task)
		})

		patience, _ := ctx.Value(patienceKey{}).(time.Duration)
		if task.Await(ctx, patience) {
			result, err := task.Result()
			if problem, ok := errors.AsType[*ErrorBody](problemOf(err)); ok {
				partial := *problem
				partial.Done = task.Done()
				return nil, &partial
			}
			if err != nil {
				return nil, err
			}
			return &longResponse{Status: http.StatusOK, Body: result}, nil
		}

		kept := api.tasks.Keep(task)
		return &longResponse{Status: http.StatusAccepted, Location: api.prefix + "/api/v1" + actionsPath + kept, Body: newAction(kept, task)}, nil
	})
}

func (a *api) addActions() {
	addQuery(a, actionsPath+"{id}", "show-action", "Show the progress or the result of a long action that the caller has started in this process",
		func(ctx context.Context, _ admin.Operator, input *struct {
			Scope
			ID string `path:"id" pattern:"^[A-Z2-7]{1,64}$"`
		},
		) (Action, error) {
			caller, _ := admin.CallerOf(ctx)
			task, known := a.tasks.Find(input.ID, caller.Actor.Name)
			if !known {
				return Action{}, newProblem(http.StatusNotFound, "this process has no action of "+caller.Actor.Name+" with this id",
					"read the audit log, which has finished actions; the same request does the rest of an action that a restart has ended")
			}
			return newAction(input.ID, task), nil
		})
}
