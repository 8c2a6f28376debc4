// The functions of the fake libibverbs, each on the fabric that there is.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "check.hpp"
#include "fake_verbs_objects.hpp"

namespace fake {

using namespace pipemorph;

namespace {

int semaphore() {
    return ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
}

bool take(int fd) {
    uint64_t one = 0;
    return ::read(fd, &one, sizeof one) == sizeof one;
}

}  // namespace

struct Calls {
    static std::unique_lock<std::recursive_mutex> lock() {
        CHECK(Fabric::current_ != nullptr);
        return std::unique_lock(Fabric::current_->mu_);
    }

    static abi::Device** get_device_list(int* count) {
        const auto l = lock();
        *count = static_cast<int>(Fabric::current_->listed_.size());
        return Fabric::current_->listed_.data();
    }
    static abi::Context* open_device(abi::Device* device) {
        const auto l = lock();
        auto* context = new Fabric::Context;
        context->device = device;
        context->async_fd = semaphore();
        context->ops.poll_cq = poll_cq;
        context->ops.req_notify_cq = req_notify_cq;
        context->ops.post_send = post_send;
        context->ops.post_recv = post_recv;
        Fabric::current_->contexts_.insert(context);
        ++Fabric::current_->open_;
        return context;
    }
    static int close_device(abi::Context* c) {
        const auto l = lock();
        auto* context = static_cast<Fabric::Context*>(c);
        // With the context the kernel ends all that was made from it.
        std::erase_if(Fabric::current_->wire_, [&](const auto& packet) {
            const auto* const from = Fabric::current_->find(packet.from);
            return from != nullptr && from->context == context;
        });
        std::erase_if(Fabric::current_->pairs_,
                      [&](const auto& p) { return p->context == context; });
        ::close(context->async_fd);
        Fabric::current_->contexts_.erase(context);
        delete context;
        --Fabric::current_->open_;
        return 0;
    }
    static Device& described(const abi::Context* context) {
        for (Device& d : Fabric::current_->devices_)
            if (&d.device == context->device) return d;
        check::fail(__FILE__, __LINE__, "no such device");
    }
    static int query_port(abi::Context* context, uint8_t port, abi::PortAttr* out) {
        const auto l = lock();
        const Device& device = described(context);
        if (port < 1 || port > device.ports.size()) return EINVAL;
        *out = {};
        out->state = device.ports[port - 1] ? abi::kPortActive : abi::kPortDown;
        out->active_mtu = 5;
        out->link_layer = abi::kLinkLayerEthernet;
        return 0;
    }
    static ssize_t query_gid_table(abi::Context* context, abi::GidEntry* out, size_t count,
                                   uint32_t, size_t) {
        const auto l = lock();
        const Device& device = described(context);
        const auto at = std::find(Fabric::current_->listed_.begin(),
                                  Fabric::current_->listed_.end(), context->device);
        const size_t n = std::min(count, device.ports.size());
        for (size_t i = 0; i < n; ++i) {
            out[i] = {};
            out[i].gid.raw[10] = out[i].gid.raw[11] = 0xff;
            out[i].gid.raw[12] = 10;
            out[i].gid.raw[14] = static_cast<uint8_t>(i + 1);
            out[i].gid.raw[15] = static_cast<uint8_t>(at - Fabric::current_->listed_.begin() + 1);
            out[i].port = static_cast<uint32_t>(i + 1);
            out[i].type = abi::kGidRoceV2;
            out[i].netdev_ifindex = 1;
        }
        return static_cast<ssize_t>(n);
    }
    static abi::Pd* alloc_pd(abi::Context* context) {
        const auto l = lock();
        ++Fabric::current_->open_;
        return reinterpret_cast<abi::Pd*>(
            new Fabric::Domain{static_cast<Fabric::Context*>(context)});
    }
    static int dealloc_pd(abi::Pd* pd) {
        const auto l = lock();
        delete reinterpret_cast<Fabric::Domain*>(pd);
        --Fabric::current_->open_;
        return 0;
    }
    static abi::Mr* reg_mr(abi::Pd* pd, void* address, size_t length, int access) {
        auto* context = reinterpret_cast<Fabric::Domain*>(pd)->context;
        errno = Fabric::current_->ask("reg_mr", context->device);
        if (errno != 0) return nullptr;
        const auto l = lock();
        errno = ENOMEM;
        if (!described(context).registers) return nullptr;
        const uint32_t key = Fabric::current_->next_key_++;
        auto* mr = new abi::Mr{context, pd, address, length, 0, key, key};
        Fabric::current_->regions_[key] = {mr, access};
        ++Fabric::current_->open_;
        return mr;
    }
    static int dereg_mr(abi::Mr* mr) {
        const auto l = lock();
        Fabric::current_->regions_.erase(mr->lkey);
        delete mr;
        --Fabric::current_->open_;
        return 0;
    }
    static abi::CompChannel* create_comp_channel(abi::Context* context) {
        const auto l = lock();
        auto* channel = new Fabric::Channel;
        channel->context = context;
        channel->fd = semaphore();
        ++Fabric::current_->open_;
        return channel;
    }
    static int destroy_comp_channel(abi::CompChannel* c) {
        const auto l = lock();
        auto* channel = static_cast<Fabric::Channel*>(c);
        if (channel->queues > 0) return EBUSY;
        ::close(channel->fd);
        delete channel;
        --Fabric::current_->open_;
        return 0;
    }
    static abi::Cq* create_cq(abi::Context* context, int entries, void* user,
                              abi::CompChannel* channel, int) {
        const auto l = lock();
        auto* queue = new Fabric::Queue;
        queue->context = context;
        queue->channel = channel;
        queue->user_context = user;
        queue->capacity = static_cast<size_t>(entries);
        if (channel != nullptr) ++static_cast<Fabric::Channel*>(channel)->queues;
        Fabric::current_->queues_.insert(queue);
        ++Fabric::current_->open_;
        return queue;
    }
    static int destroy_cq(abi::Cq* cq) {
        const auto l = lock();
        auto* queue = static_cast<Fabric::Queue*>(cq);
        // The real one would wait for the acknowledgements, for ever.
        if (queue->pairs > 0 || queue->unacknowledged > 0) return EBUSY;
        if (queue->channel != nullptr) {
            auto* channel = static_cast<Fabric::Channel*>(queue->channel);
            --channel->queues;
            std::erase(channel->events, cq);
        }
        Fabric::current_->queues_.erase(queue);
        delete queue;
        --Fabric::current_->open_;
        return 0;
    }
    static int get_cq_event(abi::CompChannel* c, abi::Cq** cq, void** user) {
        if (!take(c->fd)) return -1;
        const auto l = lock();
        auto* channel = static_cast<Fabric::Channel*>(c);
        if (channel->events.empty()) return -1;
        *cq = channel->events.front();
        *user = (*cq)->user_context;
        channel->events.pop_front();
        ++static_cast<Fabric::Queue*>(*cq)->unacknowledged;
        return 0;
    }
    static void ack_cq_events(abi::Cq* cq, unsigned int count) {
        const auto l = lock();
        static_cast<Fabric::Queue*>(cq)->unacknowledged -= count;
    }
    static abi::Qp* create_qp(abi::Pd* pd, abi::QpInitAttr* init) {
        auto* context = reinterpret_cast<Fabric::Domain*>(pd)->context;
        errno = Fabric::current_->ask("create_qp", context->device);
        if (errno != 0) return nullptr;
        const auto l = lock();
        auto pair = std::make_unique<Fabric::Pair>();
        pair->context = context;
        pair->pd = pd;
        pair->send_cq = init->send_cq;
        pair->recv_cq = init->recv_cq;
        pair->cap = init->cap;
        pair->number = Fabric::current_->next_pair_++;
        pair->device = context->device->name;
        ++pair->queue().pairs;
        ++Fabric::current_->open_;
        Fabric::current_->pairs_.push_back(std::move(pair));
        return Fabric::current_->pairs_.back().get();
    }
    static int modify_qp(abi::Qp* qp, abi::QpAttr* attr, int mask) {
        auto* pair = static_cast<Fabric::Pair*>(qp);
        if (const int error =
                Fabric::current_->ask("modify_qp", pair->context->device, attr->state))
            return error;
        const auto l = lock();
        if (attr->state == abi::kQpError) {
            Fabric::current_->to_error(*pair);
            return 0;
        }
        if (attr->state != pair->state + 1) return EINVAL;
        pair->state = attr->state;
        const auto set = [&](auto field, int bit) {
            if (mask & bit) pair->attr.*field = attr->*field;
        };
        set(&abi::QpAttr::port, abi::kSetPort);
        set(&abi::QpAttr::access, abi::kSetAccess);
        set(&abi::QpAttr::destination_qp, abi::kSetDestinationQp);
        set(&abi::QpAttr::rq_psn, abi::kSetRqPsn);
        set(&abi::QpAttr::sq_psn, abi::kSetSqPsn);
        set(&abi::QpAttr::min_rnr_timer, abi::kSetMinRnrTimer);
        set(&abi::QpAttr::timeout, abi::kSetTimeout);
        set(&abi::QpAttr::retry_count, abi::kSetRetryCount);
        set(&abi::QpAttr::rnr_retry, abi::kSetRnrRetry);
        Fabric::current_->run();
        return 0;
    }
    static int destroy_qp(abi::Qp* qp) {
        auto* pair = static_cast<Fabric::Pair*>(qp);
        if (const int error = Fabric::current_->ask("destroy_qp", pair->context->device))
            return error;
        const auto l = lock();
        Fabric::current_->read_all_of(*pair);
        --pair->queue().pairs;
        --Fabric::current_->open_;
        std::erase_if(Fabric::current_->pairs_, [&](const auto& p) { return p.get() == pair; });
        return 0;
    }
    static int get_async_event(abi::Context* c, abi::AsyncEvent* out) {
        if (!take(c->async_fd)) return -1;
        const auto l = lock();
        auto* context = static_cast<Fabric::Context*>(c);
        if (context->events.empty()) return -1;
        *out = context->events.front();
        context->events.pop_front();
        return 0;
    }

    static int poll_cq(abi::Cq* cq, int count, abi::Wc* out) {
        const auto l = lock();
        auto& entries = static_cast<Fabric::Queue*>(cq)->entries;
        int n = 0;
        for (; n < count && !entries.empty(); ++n) {
            out[n] = entries.front();
            entries.pop_front();
        }
        return n;
    }
    static int req_notify_cq(abi::Cq* cq, int) {
        const auto l = lock();
        static_cast<Fabric::Queue*>(cq)->armed = true;
        return 0;
    }
    static int post_send(abi::Qp* qp, abi::SendWr* first, abi::SendWr** bad) {
        const auto l = lock();
        auto* pair = static_cast<Fabric::Pair*>(qp);
        for (abi::SendWr* wr = first; wr != nullptr; wr = wr->next) {
            *bad = wr;
            if (pair->state != abi::kQpReadyToSend && pair->state != abi::kQpError) return EINVAL;
            if (pair->sent.size() >= pair->cap.max_send_wr) return ENOMEM;
            const uint64_t number = pair->next_send++;
            pair->sent.push_back({wr->id, number, (wr->flags & abi::kSignaled) != 0, wr->opcode});
            if (pair->state == abi::kQpError) continue;
            Fabric::Packet packet{pair->number,
                                  pair->attr.destination_qp,
                                  number,
                                  wr->opcode,
                                  wr->immediate,
                                  wr->rdma.address,
                                  wr->rdma.rkey,
                                  {wr->sges, wr->sges + wr->sge_count},
                                  {}};
            for (const abi::Sge& s : packet.unread)
                if (Fabric::current_->memory(s.lkey, s.address, s.length, 0) == nullptr)
                    return EINVAL;
            Fabric::current_->wire_.push_back(std::move(packet));
        }
        if (pair->state == abi::kQpError) Fabric::current_->to_error(*pair);
        Fabric::current_->run();
        return 0;
    }
    static int post_recv(abi::Qp* qp, abi::RecvWr* first, abi::RecvWr** bad) {
        const auto l = lock();
        auto* pair = static_cast<Fabric::Pair*>(qp);
        for (abi::RecvWr* wr = first; wr != nullptr; wr = wr->next) {
            *bad = wr;
            if (pair->receives.size() >= pair->cap.max_recv_wr || wr->sge_count != 1) return ENOMEM;
            pair->receives.push_back({wr->id, wr->sges[0]});
        }
        if (pair->state == abi::kQpError) Fabric::current_->to_error(*pair);
        Fabric::current_->run();
        return 0;
    }
};

const Verbs& Fabric::verbs() {
    static const Verbs all = [] {
        Verbs v{};
        v.get_device_list = Calls::get_device_list;
        v.free_device_list = [](abi::Device**) {};
        v.open_device = Calls::open_device;
        v.close_device = Calls::close_device;
        v.query_port = Calls::query_port;
        v.query_gid_table = Calls::query_gid_table;
        v.alloc_pd = Calls::alloc_pd;
        v.dealloc_pd = Calls::dealloc_pd;
        v.reg_mr = Calls::reg_mr;
        v.dereg_mr = Calls::dereg_mr;
        v.create_comp_channel = Calls::create_comp_channel;
        v.destroy_comp_channel = Calls::destroy_comp_channel;
        v.create_cq = Calls::create_cq;
        v.destroy_cq = Calls::destroy_cq;
        v.get_cq_event = Calls::get_cq_event;
        v.ack_cq_events = Calls::ack_cq_events;
        v.create_qp = Calls::create_qp;
        v.modify_qp = Calls::modify_qp;
        v.destroy_qp = Calls::destroy_qp;
        v.get_async_event = Calls::get_async_event;
        v.ack_async_event = [](abi::AsyncEvent*) {};
        v.wc_status_str = [](uint32_t) { return "failed work"; };
        v.event_type_str = [](uint32_t type) {
            return type == abi::kEventCqError ? "CQ error" : "asynchronous event";
        };
        v.fork_init = [] { return 0; };
        return v;
    }();
    return all;
}

}  // namespace fake
