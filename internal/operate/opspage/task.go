package opspage

import (
	"context"
	"net/http"

	"github.com/outrelay/outrelay/internal/operate/tasks"
)

// startTask starts a confirmed action. From then on, the context of call is that of the action. If a person confirms it with two clicks, it
// runs once.
func (p *page) startTask(call *call, plan preview, name string) *tasks.Task {
	slot, watcher := call.slot(), call.v.Watcher
	order := tasks.Order{Name: call.action.title, Actor: call.who.Actor.Name, Back: call.linkResult(), Once: call.q.Get(onceField)}
	return p.tasks.Start(call.ctx, order, func(ctx context.Context, task *tasks.Task) (any, error) {
		task.SetTotal(max(plan.Total, plan.Count, 0))
		call.ctx, call.did = ctx, task.SetDone
		notice, err := plan.run()
		notice.actor = order.Actor
		if err == nil {
			p.o.Log.Info("an operator acted", "action", name, "actor", order.Actor, "watcher", watcher, "slot", slot)
		}
		return &notice, err
	})
}

// finishAction shows the result of an action, or its progress if it takes longer than the patience of the page.
func (p *page) finishAction(response http.ResponseWriter, request *http.Request, call *call, started *tasks.Task) {
	if !started.Await(request.Context(), p.o.Patience) {
		http.Redirect(response, request, call.v.Link("/task", "id", p.tasks.Keep(started)), http.StatusSeeOther)
		return
	}

	result, err := started.Result()
	if err != nil {
		p.serveFailure(response, request, call, err, started.Done())
		return
	}
	http.Redirect(response, request, call.linkResult("done", p.notices.Put(result.(*notice))), http.StatusSeeOther)
}

// taskView is the data of the page of a task.
type taskView struct {
	*tasks.Task
	Seconds float64
	Notice  *notice  // of a task that succeeded
	Failed  *problem // of a task that failed
}

// Running reports whether the task has not ended.
func (v taskView) Running() bool { return v.Notice == nil && v.Failed == nil }

func showTask(call *call) (any, error) {
	started, known := call.tasks.Find(call.q.Get("id"), call.who.Actor.Name)
	if !known {
		return nil, invalidInput("this process runs no action of yours with this id; the audit log shows finished actions")
	}

	view := taskView{Task: started, Seconds: call.v.Now.Sub(started.Began).Seconds()}
	if !started.HasEnded() {
		return view, nil
	}
	result, err := started.Result()
	if err != nil {
		view.Failed = newProblem(err)
	} else {
		view.Notice = result.(*notice)
	}
	return view, nil
}
