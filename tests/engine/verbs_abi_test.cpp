// Our declarations of libibverbs against the system's own, where it has them.
#include "check.hpp"
#include "verbs/abi.hpp"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

using namespace pipemorph;

#define SAME(ours, our_field, theirs, their_field)                                   \
    static_assert(offsetof(abi::ours, our_field) == offsetof(theirs, their_field) && \
                  sizeof(abi::ours::our_field) == sizeof(theirs::their_field))
#define SAME_VALUE(ours, theirs) \
    static_assert(static_cast<long>(abi::ours) == static_cast<long>(theirs))
#define SAME_SIZE(ours, theirs) static_assert(sizeof(abi::ours) == sizeof(theirs))

SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(GidEntry, ibv_gid_entry);
SAME(GidEntry, index, ibv_gid_entry, gid_index);
SAME(GidEntry, type, ibv_gid_entry, gid_type);
SAME(GidEntry, netdev_ifindex, ibv_gid_entry, ndev_ifindex);
SAME_VALUE(kGidRoceV1, IBV_GID_TYPE_ROCE_V1);
SAME_VALUE(kGidRoceV2, IBV_GID_TYPE_ROCE_V2);

SAME_SIZE(Device, ibv_device);
SAME(Device, name, ibv_device, name);
SAME(Device, uverbs_name, ibv_device, dev_name);
SAME(Context, device, ibv_context, device);
SAME(Context, cmd_fd, ibv_context, cmd_fd);
SAME(Context, async_fd, ibv_context, async_fd);
SAME_SIZE(ContextOps, ibv_context_ops);
static_assert(offsetof(abi::ContextOps, poll_cq) == offsetof(ibv_context_ops, poll_cq));
static_assert(offsetof(abi::ContextOps, req_notify_cq) == offsetof(ibv_context_ops, req_notify_cq));
static_assert(offsetof(abi::ContextOps, post_send) == offsetof(ibv_context_ops, post_send));
static_assert(offsetof(abi::ContextOps, post_recv) == offsetof(ibv_context_ops, post_recv));

SAME_SIZE(PortAttr, ibv_port_attr);
SAME(PortAttr, active_mtu, ibv_port_attr, active_mtu);
SAME(PortAttr, lid, ibv_port_attr, lid);
SAME(PortAttr, link_layer, ibv_port_attr, link_layer);
SAME_VALUE(kPortActive, IBV_PORT_ACTIVE);
SAME_VALUE(kPortDown, IBV_PORT_DOWN);
SAME_VALUE(kLinkLayerInfiniband, IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(kLinkLayerEthernet, IBV_LINK_LAYER_ETHERNET);

SAME(CompChannel, fd, ibv_comp_channel, fd);
SAME(Mr, lkey, ibv_mr, lkey);
SAME(Mr, rkey, ibv_mr, rkey);
SAME(Cq, user_context, ibv_cq, cq_context);
SAME(Qp, number, ibv_qp, qp_num);
SAME_SIZE(QpCap, ibv_qp_cap);
SAME_SIZE(QpInitAttr, ibv_qp_init_attr);
SAME(QpInitAttr, type, ibv_qp_init_attr, qp_type);
SAME_SIZE(GlobalRoute, ibv_global_route);
SAME(GlobalRoute, traffic_class, ibv_global_route, traffic_class);
SAME_SIZE(AddressVector, ibv_ah_attr);
SAME(AddressVector, dlid, ibv_ah_attr, dlid);
SAME(AddressVector, service_level, ibv_ah_attr, sl);
SAME(AddressVector, is_global, ibv_ah_attr, is_global);
SAME(AddressVector, port, ibv_ah_attr, port_num);
SAME_SIZE(QpAttr, ibv_qp_attr);
SAME(QpAttr, path_mtu, ibv_qp_attr, path_mtu);
SAME(QpAttr, rq_psn, ibv_qp_attr, rq_psn);
SAME(QpAttr, sq_psn, ibv_qp_attr, sq_psn);
SAME(QpAttr, destination_qp, ibv_qp_attr, dest_qp_num);
SAME(QpAttr, access, ibv_qp_attr, qp_access_flags);
SAME(QpAttr, address, ibv_qp_attr, ah_attr);
SAME(QpAttr, pkey_index, ibv_qp_attr, pkey_index);
SAME(QpAttr, max_rd_atomic, ibv_qp_attr, max_rd_atomic);
SAME(QpAttr, max_dest_rd_atomic, ibv_qp_attr, max_dest_rd_atomic);
SAME(QpAttr, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME(QpAttr, port, ibv_qp_attr, port_num);
SAME(QpAttr, timeout, ibv_qp_attr, timeout);
SAME(QpAttr, retry_count, ibv_qp_attr, retry_cnt);
SAME(QpAttr, rnr_retry, ibv_qp_attr, rnr_retry);
SAME_VALUE(kQpReliable, IBV_QPT_RC);
SAME_VALUE(kQpInit, IBV_QPS_INIT);
SAME_VALUE(kQpReadyToReceive, IBV_QPS_RTR);
SAME_VALUE(kQpReadyToSend, IBV_QPS_RTS);
SAME_VALUE(kQpError, IBV_QPS_ERR);
SAME_VALUE(kSetState, IBV_QP_STATE);
SAME_VALUE(kSetAccess, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kSetPkeyIndex, IBV_QP_PKEY_INDEX);
SAME_VALUE(kSetPort, IBV_QP_PORT);
SAME_VALUE(kSetAddress, IBV_QP_AV);
SAME_VALUE(kSetMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kSetTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kSetRetryCount, IBV_QP_RETRY_CNT);
SAME_VALUE(kTransportIb, IBV_TRANSPORT_IB);
SAME_VALUE(kTransportIwarp, IBV_TRANSPORT_IWARP);
SAME_VALUE(kSetRnrRetry, IBV_QP_RNR_RETRY);
SAME_VALUE(kSetRqPsn, IBV_QP_RQ_PSN);
SAME_VALUE(kSetMaxRdAtomic, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kSetMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kSetSqPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kSetMaxDestRdAtomic, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kSetDestinationQp, IBV_QP_DEST_QPN);
SAME_VALUE(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);

SAME_SIZE(Sge, ibv_sge);
SAME(Sge, lkey, ibv_sge, lkey);
SAME_SIZE(SendWr, ibv_send_wr);
SAME(SendWr, opcode, ibv_send_wr, opcode);
SAME(SendWr, flags, ibv_send_wr, send_flags);
SAME(SendWr, immediate, ibv_send_wr, imm_data);
static_assert(offsetof(abi::SendWr, rdma.rkey) == offsetof(ibv_send_wr, wr.rdma.rkey));
SAME_VALUE(kWriteWithImmediate, IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(kSend, IBV_WR_SEND);
SAME_VALUE(kSignaled, IBV_SEND_SIGNALED);
SAME_SIZE(RecvWr, ibv_recv_wr);
SAME(RecvWr, sge_count, ibv_recv_wr, num_sge);
SAME_SIZE(Wc, ibv_wc);
SAME(Wc, bytes, ibv_wc, byte_len);
SAME(Wc, immediate, ibv_wc, imm_data);
SAME(Wc, qp_number, ibv_wc, qp_num);
SAME_VALUE(kWcSuccess, IBV_WC_SUCCESS);
SAME_VALUE(kWcFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kWcRecv, IBV_WC_RECV);
SAME_VALUE(kWcRecvWriteWithImmediate, IBV_WC_RECV_RDMA_WITH_IMM);
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME(AsyncEvent, type, ibv_async_event, event_type);
SAME_VALUE(kEventQpFatal, IBV_EVENT_QP_FATAL);
SAME_VALUE(kEventQpRequestError, IBV_EVENT_QP_REQ_ERR);
SAME_VALUE(kEventQpAccessError, IBV_EVENT_QP_ACCESS_ERR);
SAME_VALUE(kEventDeviceFatal, IBV_EVENT_DEVICE_FATAL);
SAME_VALUE(kEventPortActive, IBV_EVENT_PORT_ACTIVE);
SAME_VALUE(kEventPortError, IBV_EVENT_PORT_ERR);
SAME_VALUE(kEventLidChange, IBV_EVENT_LID_CHANGE);
SAME_VALUE(kEventGidChange, IBV_EVENT_GID_CHANGE);
#endif

TEST(verbs_layout_is_the_systems) {
    // The assertions above are the test; without the header the guests' tests stand for it.
    static_assert(sizeof(pipemorph::abi::SendWr) == 128 && sizeof(pipemorph::abi::Wc) == 48);
}
